// Memory of the "pycomm" process group for tensors, such as FSDP2's staging buffers. A part of
// _c10d.
#include "binding/c10d_backend.h"

namespace pycomm::torch_binding {
namespace {

/// Shared memory while there is room for it; it may be slower without, but not wrong.
std::shared_ptr<void> allocate(Engine& engine, size_t bytes) {
  try {
    return engine.comm().allocate(bytes);
  } catch (const Error&) {
    constexpr size_t kAlign = 64;
    void* memory = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
    if (!memory) throw std::bad_alloc();
    return std::shared_ptr<void>(memory, std::free);
  }
}

/// Its memory may outlive it, and the group.
class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  c10::DataPtr allocate(size_t bytes) override {
    using Memory = std::shared_ptr<void>;
    auto memory = std::make_unique<Memory>(torch_binding::allocate(*engine_, bytes));
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

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu())
    raise(arguments_.here() + "allocate_tensor: has memory for CPU tensors only");
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  auto memory = allocate(*engine(), std::max<size_t>(bytes, 1));
  return at::from_blob(memory.get(), {size}, [memory](void*) {}, options);
}

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  return std::make_shared<Allocator>(engine());
}

}  // namespace pycomm::torch_binding
