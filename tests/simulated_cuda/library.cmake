# SPDX-License-Identifier: Apache-2.0
# The simulated CUDA device as a library, which takes the place of libtorch_cuda.
set(simulated ${CMAKE_CURRENT_SOURCE_DIR}/tests/simulated_cuda)
add_library(simulated_cuda SHARED ${simulated}/bn_silu.cpp ${simulated}/graphs.cpp ${simulated}/memory.cpp
            ${simulated}/operators.cpp ${simulated}/streams.cpp)
set_target_properties(simulated_cuda PROPERTIES UNITY_BUILD ON)
target_compile_features(simulated_cuda PUBLIC cxx_std_20)
# Ubuntu's g++ turns on the checks of _FORTIFY_SOURCE, which forbid longjmp() to another stack: emulated_cuda.hpp.
target_compile_options(simulated_cuda PUBLIC -Wall -Wextra PRIVATE -U_FORTIFY_SOURCE)
target_compile_definitions(simulated_cuda PUBLIC YOLOX_SIMULATED_CUDA)
# Its headers precede those of torch: they stand for CUDA and NCCL.
target_include_directories(simulated_cuda PUBLIC ${simulated} ${simulated}/include
                           PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/lib ${CMAKE_CURRENT_SOURCE_DIR}/tests)
target_include_directories(simulated_cuda SYSTEM PUBLIC ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
target_link_directories(simulated_cuda PUBLIC ${torch_root}/lib)
target_link_libraries(simulated_cuda PUBLIC torch_cpu c10)
target_link_libraries(yolox PUBLIC simulated_cuda)
target_compile_definitions(yolox PUBLIC YOLOX_FUSED_NORM)
