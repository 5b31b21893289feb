// A driver without a device: it counts what is reserved, mapped and alive, and what it refuses.
#include <cuda.h>

enum { MOST = 64, UNIT = 2 << 20 };
int fake_reserved, fake_mapped, fake_handles, fake_refused, fake_limit = MOST;
static struct {
  CUdeviceptr address;
  size_t size;
  CUmemGenericAllocationHandle handle;
} ranges[MOST];
static CUdeviceptr next_address = 1ull << 40;
static CUmemGenericAllocationHandle next_handle = 100;

static CUresult refused(void) {
  ++fake_refused;
  return CUDA_ERROR_INVALID_VALUE;
}

static int find(CUdeviceptr address, size_t size) {
  for (int i = 0; i < MOST; ++i)
    if (address && ranges[i].address == address && ranges[i].size == size) return i;
  return -1;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  for (int i = 0; i < MOST; ++i)
    if (!ranges[i].address) {
      if (!size || size % UNIT) return refused();
      *address = ranges[i].address = next_address;
      ranges[i].size = size;
      next_address += size;
      ++fake_reserved;
      return CUDA_SUCCESS;
    }
  return refused();
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  const int i = find(address, size);
  if (i < 0 || ranges[i].handle) return refused();
  ranges[i].address = 0;
  --fake_reserved;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  if (!size || size % UNIT) return refused();
  if (fake_handles >= fake_limit) return CUDA_ERROR_OUT_OF_MEMORY;
  ++fake_handles;
  *handle = next_handle++;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (handle < 100 || handle >= next_handle) return refused();
  --fake_handles;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  const int i = find(address, size);
  if (i < 0 || ranges[i].handle) return refused();
  ranges[i].handle = handle;
  ++fake_mapped;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  const int i = find(address, size);
  if (i < 0 || !ranges[i].handle) return refused();
  ranges[i].handle = 0;
  --fake_mapped;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access,
                        size_t count) {
  const int i = find(address, size);
  return i < 0 || !ranges[i].handle ? refused() : CUDA_SUCCESS;
}
