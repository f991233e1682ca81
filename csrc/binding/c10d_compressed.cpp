// The compressed collectives of the "pycomm" process group, which hooks call. A part of _c10d.
#include <torch/csrc/jit/python/python_ivalue.h>

#include "binding/c10d_backend.h"

namespace pycomm::torch_binding {
namespace {

/// Takes float32 and 16-bit floats, of so many values.
void check_values(const Arguments& arguments, const Call& call, const at::Tensor& tensor,
                  const char* role, size_t numel) {
  arguments.check(call, tensor);
  if (!tensor.is_cpu())
    arguments.fail(call, "takes CPU tensors; on " + tensor.device().str() +
                             " encode there and exchange the payloads, as pycomm's hooks do");
  if (!tensor.is_floating_point() || tensor.element_size() > 4)
    arguments.fail(
        call, std::string("takes float32 and 16-bit floats, not ") + tensor.dtype().name().data());
  if (static_cast<size_t>(tensor.numel()) != numel)
    arguments.fail(call, std::string(role) + " has " + std::to_string(tensor.numel()) +
                             " values, and by its layout " + std::to_string(numel));
}

/// A tensor's values as float32: where they are, or in a copy.
class Floats {
 public:
  explicit Floats(const at::Tensor& tensor)
      : tensor_(tensor), floats_(tensor.to(at::kFloat).contiguous()) {}
  float* data() const { return floats_.mutable_data_ptr<float>(); }
  void finish() const {
    if (!floats_.is_same(tensor_)) tensor_.copy_(floats_);
  }

 private:
  at::Tensor tensor_, floats_;
};

}  // namespace

template <typename Op>
intrusive_ptr<Work> Backend::compressed(const Call& call, const at::Tensor& output,
                                        const std::shared_ptr<const Layout>& layout,
                                        const CodedStep& step, Op op) {
  if (step.sides.size() != layout->size())
    arguments_.fail(call, "there are sides for " + std::to_string(step.sides.size()) +
                              " parameters, the layout has " + std::to_string(layout->size()));
  for (const Sides& sides : step.sides)
    if (sides.old > 1 || sides.fresh > 1) arguments_.fail(call, "a side is 0 or 1");
  const auto engine = this->engine();
  auto work = engine->make_work(true, call, {output});
  // What a comm hook's future must hold: a Python object.
  const c10::TypePtr object = c10::PyObjectType::get();
  work->set_value(torch::jit::toIValue(py::cast(output), object), object);
  engine->submit(work, [layout, step, op = std::move(op), raw = work.get()](Communicator& comm) {
    const std::vector<Piece> pieces = layout->pieces(step.sides);
    CodedArgs args;
    args.pieces = {pieces.data(), pieces.size()};
    args.average = step.average;
    args.seed = step.seed;
    args.step = step.step;
    raw->set_finite(op(comm, args));
  });
  return work;
}

intrusive_ptr<Work> Backend::compressed_all_reduce(const at::Tensor& tensor,
                                                   std::shared_ptr<const Layout> layout,
                                                   const CodedStep& step) {
  const Call call("pycomm:compressed all_reduce", OpType::ALLREDUCE, c10d::AllreduceOptions());
  check_values(arguments_, call, tensor, "the bucket", layout->numel());
  return compressed(call, tensor, layout, step, [=](Communicator& comm, CodedArgs& args) {
    const Floats values(tensor);
    args.data = {values.data(), layout->numel()};
    const bool finite = comm.all_reduce_coded(args);
    values.finish();
    return finite;
  });
}

intrusive_ptr<Work> Backend::compressed_reduce_scatter(const at::Tensor& output,
                                                       const at::Tensor& input,
                                                       std::shared_ptr<const Layout> layout,
                                                       const CodedStep& step) {
  const Call call("pycomm:compressed reduce_scatter", OpType::_REDUCE_SCATTER_BASE,
                  c10d::ReduceScatterOptions());
  const size_t row = layout->numel(), ranks = static_cast<size_t>(size_);
  check_values(arguments_, call, output, "output", row);
  check_values(arguments_, call, input, "input", ranks * row);
  if (layout->rows() != ranks)
    arguments_.fail(call, "the layout has residuals of " + std::to_string(layout->rows()) +
                              " rows; make it as Layout(" + std::to_string(ranks) + ")");
  return compressed(call, output, layout, step, [=](Communicator& comm, CodedArgs& args) {
    const Floats from(input), to(output);
    args.data = {from.data(), ranks * row};
    const bool finite = comm.reduce_scatter_coded(args, to.data());
    to.finish();
    return finite;
  });
}

intrusive_ptr<Work> Backend::compressed_all_gather(const at::Tensor& output,
                                                   const at::Tensor& input,
                                                   std::shared_ptr<const Layout> layout,
                                                   const CodedStep& step) {
  const Call call("pycomm:compressed all_gather", OpType::_ALLGATHER_BASE,
                  c10d::AllgatherOptions());
  const size_t row = layout->numel();
  check_values(arguments_, call, output, "output", static_cast<size_t>(size_) * row);
  check_values(arguments_, call, input, "input", row);
  if (layout->rows() != 1) arguments_.fail(call, "the layout's residuals must have one row");
  return compressed(call, output, layout, step, [=](Communicator& comm, CodedArgs& args) {
    const Floats from(input), to(output);
    args.data = {from.data(), row};
    const bool finite = comm.all_gather_coded(args, to.data());
    to.finish();
    return finite;
  });
}

}  // namespace pycomm::torch_binding
