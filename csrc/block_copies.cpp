// Enqueues copies of contiguous blocks on the GPU's copy engines, and waits between streams before
// and after the copies. Python makes one call, which makes a single CUDA runtime call for all
// blocks.
//
// If copies are enqueued one by one or in a CUDA graph, the engines idle between them. A batch of
// copies avoids this, but a graph cannot capture a batch (docs/adr/0003).

#include <Python.h>

#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <cstdint>

namespace {

void check(cudaError_t code, const char* what) {
  TORCH_CHECK(code == cudaSuccess, what, ": ", cudaGetErrorString(code));
}

cudaStream_t as_stream(int64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

// Makes operations enqueued later on the stream pairs[i] wait for all operations enqueued so far on
// the stream pairs[i + 1].
void wait(at::IntArrayRef pairs) {
  TORCH_CHECK(pairs.size() % 2 == 0, "waits are pairs of streams");
  for (size_t i = 0; i < pairs.size(); i += 2) {
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    cudaError_t code = cudaEventRecord(event, as_stream(pairs[i + 1]));
    if (code == cudaSuccess) code = cudaStreamWaitEvent(as_stream(pairs[i]), event, 0);
    cudaEventDestroy(event);  // the runtime frees it once the device has reached it
    check(code, "a wait between streams");
  }
}

// table: int64 tensor of shape (3, num_blocks) on the CPU, with rows for destination addresses,
// source addresses and sizes in bytes. stream: must not be the default stream. first, then:
// (waiting, awaited) pairs of streams for the waits before and after the copies.
void queue_blocks(const at::Tensor& table, int64_t stream, at::IntArrayRef first,
                  at::IntArrayRef then) {
  TORCH_CHECK(table.device().is_cpu() && table.scalar_type() == at::kLong && table.dim() == 2 &&
                  table.size(0) == 3 && table.is_contiguous(),
              "a table of blocks is int64 of shape (3, num_blocks), on the CPU");
  wait(first);
  const auto count = static_cast<size_t>(table.size(1));
  if (count > 0) {
    // The table's 64-bit fields are addresses and sizes in the runtime's own types.
    static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8);
    auto* fields = static_cast<int64_t*>(table.data_ptr());
    auto* dests = reinterpret_cast<void**>(fields);
    auto* sources = reinterpret_cast<void**>(fields + count);
    auto* sizes = reinterpret_cast<size_t*>(fields + 2 * count);
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t index = 0;
#if CUDART_VERSION >= 13000
    cudaError_t code = cudaMemcpyBatchAsync(dests, sources, sizes, count, &attributes, &index, 1,
                                            as_stream(stream));
#else
    size_t failed = 0;
    cudaError_t code = cudaMemcpyBatchAsync(dests, sources, sizes, count, &attributes, &index, 1,
                                            &failed, as_stream(stream));
#endif
    check(code, "cudaMemcpyBatchAsync");
  }
  wait(then);
}

}  // namespace

TORCH_LIBRARY(hybridrl, library) {
  library.def("queue_blocks(Tensor table, int stream, int[] first, int[] then) -> ()");
  library.impl("queue_blocks", c10::DispatchKey::CompositeExplicitAutograd, queue_blocks);
}

// `import hybridrl._C` loads the library, which registers the operation.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
