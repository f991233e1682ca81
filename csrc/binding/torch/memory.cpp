// Tensor memory of the "pycomm" process group, such as FSDP2's staging buffers. A part of _c10d.
#include "binding/torch/backend.h"

namespace pycomm::torch_binding {
namespace {

/// Returns shared memory while there is room for it; other memory may be slower, but not wrong.
std::shared_ptr<void> memory_of(Engine& engine, size_t bytes) {
  if (bytes > kLargestBuffer) throw std::bad_alloc();
  try {
    return engine.comm().allocate(bytes);
  } catch (const Error&) {
    constexpr size_t kAlign = 64;
    void* memory = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
    if (!memory) throw std::bad_alloc();
    return std::shared_ptr<void>(memory, std::free);
  }
}

/// An allocator of the group's memory, which may outlive it, and the group.
class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  c10::DataPtr allocate(size_t bytes) override {
    using Memory = std::shared_ptr<void>;
    auto memory = std::make_unique<Memory>(memory_of(*engine_, bytes));
    void* data = memory->get();
    return {data, memory.release(), [](void* held) { delete static_cast<Memory*>(held); },
            c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  const std::shared_ptr<Engine> engine_;
};

}  // namespace

at::Tensor Backend::allocate(int64_t size, const at::TensorOptions& options) {
  if (!options.device().is_cpu())
    raise(arguments_.here() +
          "allocate_tensor: it allocates CPU tensors only; ask torch for others");
  const size_t itemsize = options.dtype().itemsize();
  if (size < 0 || static_cast<size_t>(size) > kLargestBuffer / itemsize)
    raise(arguments_.here() + "allocate_tensor: cannot make a tensor of " + std::to_string(size) +
          " values");
  const size_t bytes = static_cast<size_t>(size) * itemsize;
  auto memory = memory_of(*engine(), std::max<size_t>(bytes, 1));
  return at::from_blob(memory.get(), {size}, [memory](void*) {}, options);
}

namespace {

/// True if torch's reducer wants real numbers for a bucket of complex parameters. It views what it
/// allocates itself as real, but in some versions not what a backend has allocated. So it is
/// tested, once, by making a reducer.
bool reducer_wants_reals(Backend& backend) {
  static std::atomic<int> known{-1};
  thread_local bool asking = false;
  if (asking) return false;  // the test needs the reducer to get complex memory
  if (known < 0) {
    const GilAcquired gil;
    asking = true;
    try {
      const auto self = intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(&backend);
      known = py::module_::import("pycomm.backend")
                  .attr("reducer_wants_reals")(py::cast(self))
                  .cast<bool>();
    } catch (...) {
      asking = false;
      throw;
    }
    asking = false;
  }
  return known > 0;
}

}  // namespace

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const at::Tensor tensor = allocate(size, options);
  if (!tensor.is_complex() || !reducer_wants_reals(*this)) return tensor;
  return at::view_as_real(tensor).reshape({-1});
}

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  return std::make_shared<Allocator>(engine());
}

}  // namespace pycomm::torch_binding
