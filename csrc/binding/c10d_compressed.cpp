// The compressed all-reduce of the "pycomm" process group, which DDP's hook calls. A part of _c10d.
#include <torch/csrc/jit/python/python_ivalue.h>

#include "binding/c10d_backend.h"

namespace pycomm::torch_binding {

intrusive_ptr<Work> Backend::compressed_all_reduce(const at::Tensor& tensor,
                                                   std::shared_ptr<const Layout> layout, int side,
                                                   uint64_t seed, uint32_t step, bool average) {
  const Call call("pycomm:compressed all_reduce", OpType::ALLREDUCE, c10d::AllreduceOptions());
  arguments_.check(call, tensor);
  if (!tensor.is_floating_point() || tensor.element_size() > 4)
    arguments_.fail(
        call, std::string("takes float32 and 16-bit floats, not ") + tensor.dtype().name().data());
  if (layout->numel() != static_cast<size_t>(tensor.numel()))
    arguments_.fail(call, "the bucket has " + std::to_string(tensor.numel()) +
                              " values, its layout " + std::to_string(layout->numel()));
  if (side != 0 && side != 1) arguments_.fail(call, "side is 0 or 1");

  const auto engine = this->engine();
  auto work = engine->make_work(call, {tensor});
  // What a comm hook's future must hold: a Python object.
  const c10::TypePtr object = c10::PyObjectType::get();
  work->set_value(torch::jit::toIValue(py::cast(tensor), object), object);
  engine->submit(work, [=, raw = work.get()](Communicator& comm) {
    const at::Tensor values = tensor.to(at::kFloat).contiguous();
    const std::vector<Piece> pieces = layout->pieces(side);
    CodedArgs args;
    args.data = {values.mutable_data_ptr<float>(), layout->numel()};
    args.pieces = {pieces.data(), pieces.size()};
    args.average = average;
    args.seed = seed;
    args.step = step;
    raw->set_finite(comm.all_reduce_coded(args));
    if (!values.is_same(tensor)) tensor.copy_(values);
  });
  return work;
}

}  // namespace pycomm::torch_binding
