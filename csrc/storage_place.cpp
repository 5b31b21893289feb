// Lets the storage of a tensor lie at addresses that somebody else maps: tensors and views that
// share the storage stay what they are, as when torch resizes it.

#include <torch/library.h>

#include <cstdint>

namespace {

// What the storage held is freed. address: of the tensor's device, num_bytes of it mapped for as
// long as the storage is used; nobody frees it with the storage. 0, with no bytes: nowhere.
void place_storage(const at::Tensor& tensor, int64_t address, int64_t num_bytes) {
  TORCH_CHECK(num_bytes >= 0 && (address != 0 || num_bytes == 0), "no bytes lie at address 0");
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(reinterpret_cast<void*>(address), tensor.device()));
  storage->set_nbytes(num_bytes);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hybridrl, library) {
  library.def("place_storage(Tensor tensor, int address, int num_bytes) -> ()");
  library.impl("place_storage", c10::DispatchKey::CompositeExplicitAutograd, place_storage);
}
