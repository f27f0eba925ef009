# SPDX-License-Identifier: Apache-2.0
# The programs in a container. setup.sh installs what they need: docs/install.md lists it.
#   docker build -t yolox .                                                    # CPU
#   docker build -t yolox --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg DRIVER=580 .
#   docker run --rm -it -v "$PWD:/work" yolox train --data /work/DIR           # with a GPU: --gpus all --shm-size 8g
# DRIVER is the version of the NVIDIA driver of the machine that runs the container, because no driver is visible during
# the build.
ARG BASE=debian:12
FROM ${BASE}
ARG DRIVER=none
WORKDIR /yolox
COPY . .
RUN YOLOX_DRIVER=${DRIVER} ./setup.sh && rm -rf /var/lib/apt/lists/*
ENV PATH=/yolox:${PATH}
WORKDIR /work
CMD ["train", "--help"]
