# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine, with a network of limited bandwidth and a delay between them. Needs root."""
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import time

IP = shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
MTU = 32000  # bytes; large, so that few packets cost little time here


def open_device(host):
    """Opens the network device of a host. What is sent there can be read from the file, and the other way round."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, there = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", f"/run/netns/{host}"))
    if libc.setns(there, 0):
        raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"net", 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
    libc.setns(home, 0)
    os.close(home)
    os.close(there)
    return device


class Network:
    """hosts: number of hosts. bandwidth: bit/s from and to each host. delay: seconds in one direction."""

    def __init__(self, hosts, bandwidth, delay):
        self.names = [f"yolox{os.getpid()}-{i}" for i in range(hosts)]
        self.bandwidth, self.delay, devices = bandwidth, delay, []
        for i, name in enumerate(self.names):
            self.ip("netns", "add", name)
            devices.append(open_device(name))
            self.ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "net")
            self.ip("-n", name, "link", "set", "net", "mtu", str(MTU), "up")
            self.ip("-n", name, "link", "set", "lo", "up")
        self.process = os.fork()
        if self.process == 0:
            try:
                self.forward(devices)
            finally:
                os._exit(1)
        for device in devices:
            os.close(device)

    @staticmethod
    def ip(*words):
        subprocess.run([IP, *words], check=True)

    @staticmethod
    def address(host):
        return f"10.78.0.{host + 1}"

    def on(self, host, command):
        """Returns the command that runs `command` on a host."""
        return [IP, "netns", "exec", self.names[host], *command]

    def forward(self, devices):
        """Passes packets on until this process is killed. A host sends its next packet after the last one has left, and
        a packet arrives when the link of its receiver has had time for it and for those before."""
        sent, received = [0.0] * len(devices), [0.0] * len(devices)  # time at which the link is free
        under_way, count = [], 0
        while True:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, to, packet = heapq.heappop(under_way)
                try:
                    os.write(devices[to], packet)
                except OSError:
                    pass  # is lost
            free = [d for d, t in zip(devices, sent) if t <= now]
            times = [t for t in sent if t > now] + [u[0] for u in under_way[:1]]
            ready, _, _ = select.select(free, [], [], max(0.0, min(times) - now) if times else None)
            for device in ready:
                packet, i = os.read(device, MTU + 100), devices.index(device)
                to = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the IPv4 address
                if not 0 <= to < len(devices):
                    continue
                seconds, now = 8 * len(packet) / self.bandwidth, time.monotonic()
                sent[i] = max(now - 2e-3, sent[i]) + seconds  # catches up if this process was late
                received[to] = max(sent[i], received[to] + seconds)
                heapq.heappush(under_way, (max(now, received[to]) + self.delay, count, to, packet))
                count += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        for name in self.names:
            self.ip("netns", "del", name)
