// An allocator for torch's memory pools whose pieces of physical memory can be given back and made
// anew, or lent (hybridrl/hybrid_engine/memory/lending.py), while their addresses stay reserved: tensors
// and CUDA graphs are valid again once memory is mapped there.
//
// Only making and ending a piece is done here, since torch calls it under a lock of its own and
// nothing may wait for Python then. In between others map and unmap (parallel/device_mapping.py)
// and say here which handle is mapped.

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

// Never ended: torch may free memory after the statics of a process have ended.
auto& lock = *new std::mutex;
auto& pieces = *new std::map<CUdeviceptr, Piece>;

// A function of the driver; not linked, so that the library loads where there is no driver.
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

// Of each piece address, bytes and handle; in the order of addresses.
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

// Says which memory is mapped at a piece's address, all of it; 0: none.
void set_engine_piece(int64_t address, int64_t handle) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = pieces.find(static_cast<CUdeviceptr>(address));
  TORCH_CHECK(found != pieces.end(), "no piece of engine memory begins at ", address);
  found->second.handle = static_cast<CUmemGenericAllocationHandle>(handle);
}

}  // namespace

// As torch calls an allocator of a pool; nullptr: the device has no memory.
extern "C" void* hybridrl_make_engine_memory(ssize_t size, int device, cudaStream_t) {
  constexpr size_t kGranularity = 2 << 20;  // as of parallel/device_mapping.py
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
  cudaDeviceSynchronize();  // as cudaFree does: work on the device may still use it
  cudaSetDevice(current);
  // What is refused here, as when a process ends, the driver frees with the process.
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
