// Moves the storage of a tensor to addresses that other code maps. Tensors and views that share the
// storage stay valid, as when torch resizes it.

#include <torch/library.h>

#include <cstdint>

namespace {

// Frees the storage's previous memory. address: num_bytes on the tensor's device, which must stay
// mapped while the storage is used and are not freed with it. Address 0 with 0 bytes: no memory.
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
