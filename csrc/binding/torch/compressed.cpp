// Compressed collectives of the "pycomm" process group, which hooks call. A part of _c10d.
#include <torch/csrc/jit/python/python_ivalue.h>

#include "binding/torch/backend.h"

namespace pycomm::torch_binding {
namespace {

/// Checks that a tensor has float32 or 16-bit floats, this many values, and the residuals' device.
void check_values(const Arguments& arguments, const Call& call, const at::Tensor& tensor,
                  const Layout& layout, const char* role, size_t numel) {
  arguments.check(call, tensor);
  const at::ScalarType type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)
    arguments.fail(
        call, std::string("takes float32 and 16-bit floats, not ") + tensor.dtype().name().data());
  if (static_cast<size_t>(tensor.numel()) != numel)
    arguments.fail(call, std::string(role) + " has " + std::to_string(tensor.numel()) +
                             " values, and by its layout " + std::to_string(numel));
  if (!layout.is_on(tensor.device()))
    arguments.fail(call, std::string(role) + " is on " + tensor.device().str() +
                             ", and its residuals are elsewhere");
}

/// The values of a tensor in one piece: its own, or, if they are not in one piece or of another
/// dtype than is wanted, those of a copy, which finish() copies back.
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

/// Returns a dtype that can represent both tensors.
at::ScalarType common_type(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() ? a.scalar_type() : at::kFloat;
}

/// One call: from the tensors of `input` to those of `output`, the same in an all-reduce.
struct CodedCall {
  Op op;
  at::Tensor output, input;
  std::shared_ptr<const Layout> layout;
  CodedStep step;

  /// Calls run(args, address of the result).
  template <typename Run>
  void with_args(const Run& run) const {
    const std::vector<Piece> pieces = layout->pieces(step.sides);
    CodedArgs args;
    args.pieces = {pieces.data(), pieces.size()};
    args.average = step.average;
    args.owner_residuals = layout->owner_residuals();
    args.seed = step.seed;
    args.step = step.step;
    const at::ScalarType type = common_type(input, output);
    const Contiguous to(output, type);
    if (op == Op::all_reduce) {
      args.data = to.values();
      run(args, args.data.data);
    } else {
      const Contiguous from(input, type);
      args.data = from.values();
      run(args, to.values().data);
    }
    to.finish();
  }
};

/// Runs a coded operation of a Communicator or a DeviceGroup.
template <typename Group, typename... More>
auto coded(Group& group, Op op, const CodedArgs& args, void* out, More... more) {
  if (op == Op::all_reduce) return group.all_reduce_coded(args, more...);
  if (op == Op::reduce_scatter) return group.reduce_scatter_coded(args, out, more...);
  return group.all_gather_coded(args, out, more...);
}

/// Queues the operation on the current stream.
void code_among_peers(const CodedCall& coded_call, PeerRoute& route, const at::Tensor& found_inf) {
  coded_call.with_args([&](const CodedArgs& args, void* out) {
    route.code(coded_call.op, args, [&](DeviceGroup& group, Stream stream) {
      coded(group, coded_call.op, args, out, stream, found_inf.mutable_data_ptr<float>());
    });
  });
}

}  // namespace

bool Backend::compresses(const std::string& op, const at::Tensor& tensor,
                         const std::shared_ptr<const Layout>& layout) {
  if (tensor.is_cpu()) return true;
  const auto engine = this->engine();
  if (!layout->is_on(tensor.device()) || !engine->peers(tensor.device())) return false;
  const auto route = engine->peers(tensor.device(), PeerRoute::Kind::coded);
  const auto dtype = find_dtype(tensor.scalar_type());
  if (!route || !dtype) return false;
  const std::vector<Piece> pieces = layout->pieces(std::vector<Sides>(layout->size()));
  const bool scatters = op == "reduce_scatter";
  CodedArgs args;
  args.pieces = {pieces.data(), pieces.size()};
  args.data = {nullptr, layout->numel() * (scatters ? static_cast<size_t>(size_) : 1), *dtype};
  return route->can_code(scatters             ? Op::reduce_scatter
                         : op == "all_gather" ? Op::all_gather
                                              : Op::all_reduce,
                         args);
}

intrusive_ptr<Work> Backend::compressed(const Call& call, Op op, const at::Tensor& output,
                                        const at::Tensor& input,
                                        const std::shared_ptr<const Layout>& layout,
                                        const CodedStep& step) {
  if (step.sides.size() != layout->size())
    arguments_.fail(call, "sides are given for " + std::to_string(step.sides.size()) +
                              " parameters, but the layout has " + std::to_string(layout->size()));
  arguments_.check_written(call, output);
  for (const Sides& sides : step.sides)
    if (sides.old > 1 || sides.fresh > 1) arguments_.fail(call, "sides must be 0 or 1");
  const auto engine = this->engine();
  const CodedCall coded_call{op, output, input, layout, step};
  if (!output.is_cpu()) {
    const auto route = engine->peers(output.device())
                           ? engine->peers(output.device(), PeerRoute::Kind::coded)
                           : nullptr;
    if (!route)
      arguments_.fail(call, "on " + output.device().str() +
                                " needs ranks that reach each other's memory: encode there and "
                                "exchange the payloads, as pycomm's hooks do");
    const at::Tensor found_inf =
        at::zeros({1}, at::TensorOptions(at::kFloat).device(output.device()));
    Tensors used = {output, input, found_inf};
    layout->list_residuals(used);
    auto work = engine->submit(call, {output}, route, used, [&](PeerRoute& peers) {
      code_among_peers(coded_call, peers, found_inf);
    });
    work->set_found_inf(found_inf);
    return work;
  }
  auto work = engine->make_work(true, call, {output});
  // A comm hook's future must hold a Python object.
  const c10::TypePtr object = c10::PyObjectType::get();
  work->set_value(torch::jit::toIValue(py::cast(output), object), object);
  engine->submit(work, [coded_call, raw = work.get()](Communicator& comm) {
    coded_call.with_args([&](const CodedArgs& args, void* out) {
      raw->set_finite(coded(comm, coded_call.op, args, out));
    });
  });
  return work;
}

intrusive_ptr<Work> Backend::compressed_all_reduce(const at::Tensor& tensor,
                                                   std::shared_ptr<const Layout> layout,
                                                   const CodedStep& step) {
  const Call call("pycomm:compressed all_reduce", OpType::ALLREDUCE, c10d::AllreduceOptions());
  check_values(arguments_, call, tensor, *layout, "the bucket", layout->numel());
  return compressed(call, Op::all_reduce, tensor, tensor, layout, step);
}

intrusive_ptr<Work> Backend::compressed_reduce_scatter(const at::Tensor& output,
                                                       const at::Tensor& input,
                                                       std::shared_ptr<const Layout> layout,
                                                       const CodedStep& step) {
  const Call call("pycomm:compressed reduce_scatter", OpType::_REDUCE_SCATTER_BASE,
                  c10d::ReduceScatterOptions());
  const size_t row = layout->numel(), ranks = static_cast<size_t>(size_);
  check_values(arguments_, call, output, *layout, "output", row);
  check_values(arguments_, call, input, *layout, "input", ranks * row);
  if (layout->rows() != ranks)
    arguments_.fail(call, "the layout has residuals of " + std::to_string(layout->rows()) +
                              " rows; make it as Layout(" + std::to_string(ranks) + ")");
  return compressed(call, Op::reduce_scatter, output, input, layout, step);
}

intrusive_ptr<Work> Backend::compressed_all_gather(const at::Tensor& output,
                                                   const at::Tensor& input,
                                                   std::shared_ptr<const Layout> layout,
                                                   const CodedStep& step) {
  const Call call("pycomm:compressed all_gather", OpType::_ALLGATHER_BASE,
                  c10d::AllgatherOptions());
  const size_t row = layout->numel();
  check_values(arguments_, call, output, *layout, "output", static_cast<size_t>(size_) * row);
  check_values(arguments_, call, input, *layout, "input", row);
  if (layout->rows() != 1) arguments_.fail(call, "the layout's residuals must have one row");
  return compressed(call, Op::all_gather, output, input, layout, step);
}

}  // namespace pycomm::torch_binding
