// The part of the runtime's interface that csrc/engine_pool.cpp asks, for tests without CUDA.
#pragma once

typedef void* cudaStream_t;
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaSetDevice(int) { return 0; }
inline int cudaDeviceSynchronize() { return 0; }
