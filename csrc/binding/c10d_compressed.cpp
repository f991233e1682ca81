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
  const at::ScalarType type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)
    arguments.fail(
        call, std::string("takes float32 and 16-bit floats, not ") + tensor.dtype().name().data());
  if (static_cast<size_t>(tensor.numel()) != numel)
    arguments.fail(call, std::string(role) + " has " + std::to_string(tensor.numel()) +
                             " values, and by its layout " + std::to_string(numel));
}

/// Where a tensor's values are; those of a copy, which finish() copies back, if they are not in one
/// piece or of another dtype than is wanted.
class Contiguous {
 public:
  Contiguous(const at::Tensor& tensor, at::ScalarType type)
      : tensor_(tensor), whole_(tensor.to(type).contiguous()) {}
  pycomm::Values values() const {
    return {whole_.mutable_data_ptr(), static_cast<size_t>(whole_.numel()),
            *find_dtype(whole_.scalar_type())};
  }
  void finish() const {
    if (!whole_.is_same(tensor_)) tensor_.copy_(whole_);
  }

 private:
  at::Tensor tensor_, whole_;
};

/// In which the two can be.
at::ScalarType common_type(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() ? a.scalar_type() : at::kFloat;
}

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
    const Contiguous bucket(tensor, tensor.scalar_type());
    args.data = bucket.values();
    const bool finite = comm.all_reduce_coded(args);
    bucket.finish();
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
    const at::ScalarType type = common_type(input, output);
    const Contiguous from(input, type), to(output, type);
    args.data = from.values();
    const bool finite = comm.reduce_scatter_coded(args, to.values().data);
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
    const at::ScalarType type = common_type(input, output);
    const Contiguous from(input, type), to(output, type);
    args.data = from.values();
    const bool finite = comm.all_gather_coded(args, to.values().data);
    to.finish();
    return finite;
  });
}

}  // namespace pycomm::torch_binding
