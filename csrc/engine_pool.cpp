// An allocator for torch's memory pools. The physical memory of its pieces can be released,
// replaced or lent (hybridrl/hybrid_engine/memory/lending.py), while their addresses stay reserved.
// Tensors and CUDA graphs become valid again once memory is mapped at their addresses.
//
// This file only creates and destroys pieces. Torch calls it while holding its own lock, when
// nothing may wait for Python. During a piece's life, parallel/device_mapping.py maps and unmaps
// its memory, and set_engine_piece records the handle of the mapped memory.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace {

struct Piece {
  size_t size;
  CUmemGenericAllocationHandle handle;  // 0: no memory is mapped
};

// Never destroyed: torch may free memory after a process's static objects are destroyed.
auto& lock = *new std::mutex;
auto& pieces = *new std::map<CUdeviceptr, Piece>;

// Finds a driver function at run time. The driver is not linked, so that this library loads without
// it.
template <typename Function>
Function* function(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void* found = library ? dlsym(library, name) : nullptr;
  TORCH_CHECK(found, "the CUDA driver has no ", name);
  return reinterpret_cast<Function*>(found);
}
#define DRIVER(name) function<decltype(name)>(#name)

CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

bool make(size_t size, int device, CUdeviceptr* address, CUmemGenericAllocationHandle* handle) {
  const CUmemAllocationProp properties = properties_of(device);
  if (DRIVER(cuMemAddressReserve)(address, size, 0, 0, 0) != CUDA_SUCCESS) return false;
  if (DRIVER(cuMemCreate)(handle, size, &properties, 0) == CUDA_SUCCESS) {
    if (DRIVER(cuMemMap)(*address, size, 0, *handle, 0) == CUDA_SUCCESS) {
      CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      if (DRIVER(cuMemSetAccess)(*address, size, &access, 1) == CUDA_SUCCESS) return true;
      DRIVER(cuMemUnmap)(*address, size);
    }
    DRIVER(cuMemRelease)(*handle);
  }
  DRIVER(cuMemAddressFree)(*address, size);
  return false;
}

// Returns address, size in bytes and handle of each piece, in order of addresses.
std::vector<int64_t> engine_pieces() {
  const std::lock_guard<std::mutex> guard(lock);
  std::vector<int64_t> found;
  for (const auto& [address, piece] : pieces) {
    found.push_back(static_cast<int64_t>(address));
    found.push_back(static_cast<int64_t>(piece.size));
    found.push_back(static_cast<int64_t>(piece.handle));
  }
  return found;
}

// Records the handle of the memory that is mapped for a piece; 0 if none is mapped.
void set_engine_piece(int64_t address, int64_t handle) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = pieces.find(static_cast<CUdeviceptr>(address));
  TORCH_CHECK(found != pieces.end(), "no piece of engine memory begins at ", address);
  found->second.handle = static_cast<CUmemGenericAllocationHandle>(handle);
}

}  // namespace

// Called by torch to allocate in a pool; returns nullptr if the device is out of memory.
extern "C" void* hybridrl_make_engine_memory(ssize_t size, int device, cudaStream_t) {
  constexpr size_t kGranularity = 2 << 20;  // as in parallel/device_mapping.py
  const size_t whole = (static_cast<size_t>(size) + kGranularity - 1) / kGranularity * kGranularity;
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0;
  if (!make(whole, device, &address, &handle)) return nullptr;
  const std::lock_guard<std::mutex> guard(lock);
  pieces[address] = {whole, handle};
  return reinterpret_cast<void*>(address);
}

extern "C" void hybridrl_end_engine_memory(void* start, ssize_t, int device, cudaStream_t) {
  const auto address = reinterpret_cast<CUdeviceptr>(start);
  Piece piece;
  {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = pieces.find(address);
    if (found == pieces.end()) return;
    piece = found->second;
    pieces.erase(found);
  }
  int current = device;
  cudaGetDevice(&current);
  cudaSetDevice(device);
  cudaDeviceSynchronize();  // like cudaFree: work on the device may still use the memory
  cudaSetDevice(current);
  // Errors are ignored: at the end of a process, the driver frees the memory itself.
  if (piece.handle) {
    DRIVER(cuMemUnmap)(address, piece.size);
    DRIVER(cuMemRelease)(piece.handle);
  }
  DRIVER(cuMemAddressFree)(address, piece.size);
}

TORCH_LIBRARY_FRAGMENT(hybridrl, library) {
  library.def("engine_pieces() -> int[]");
  library.impl("engine_pieces", c10::DispatchKey::CompositeExplicitAutograd, engine_pieces);
  library.def("set_engine_piece(int address, int handle) -> ()");
  library.impl("set_engine_piece", c10::DispatchKey::CompositeExplicitAutograd, set_engine_piece);
}
