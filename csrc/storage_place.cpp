// Moves a tensor's storage to addresses that other code maps. All tensors and views of the storage
// stay valid, as they do when torch resizes it.

#include <torch/library.h>

#include <cstdint>

namespace {

// Frees the storage's previous memory. address: start of num_bytes bytes on the tensor's device.
// They must stay mapped while the storage is in use, and are not freed with it. With address 0 and
// 0 bytes, the storage has no memory.
void place_storage(const at::Tensor& tensor, int64_t address, int64_t num_bytes) {
  TORCH_CHECK(num_bytes >= 0 && (address != 0 || num_bytes == 0), "address 0 needs 0 bytes");
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(reinterpret_cast<void*>(address), tensor.device()));
  storage->set_nbytes(num_bytes);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hybridrl, library) {
  library.def("place_storage(Tensor tensor, int address, int num_bytes) -> ()");
  library.impl("place_storage", c10::DispatchKey::CompositeExplicitAutograd, place_storage);
}
