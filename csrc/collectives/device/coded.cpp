// Collectives with codecs on GPUs: kernels of the codecs, which write into memory of their own rank
// and read peers' memory in place, and barriers between them. They work as on the CPU (coded.h),
// with the same bytes; bytes only move in an encode or a decode.
//
// Beside the slots of the exact kernels each rank shares places of one size:
//
//   for each rank | result | shown
//
// The schedule is that of all coded operations (coded/two_shot.h), in stages of one segment of each
// chunk, which fits in a place. A stage has two barriers: one after the contributions for owners,
// and one after the results and what is shown to all. Data for an owner are read between the two,
// and the rest after the second, so nothing is written while it is read: the next stage writes the
// former after the second barrier and the rest after its first.
//
// Kernels that are queued after a barrier that fails run all the same, on what is there. Since no
// rank writes into the memory of others, they spoil only results of a group that has failed; the
// last kernel of an operation then overwrites them.
#include "collectives/coded/coded.h"

#include <algorithm>

#include "collectives/coded/two_shot.h"
#include "collectives/device/group.h"
#include "core/arithmetic.h"

namespace pycomm {
namespace {

using coded::Coder;
using coded::Plan;
using coded::Shot;

}  // namespace

/// The places of one operation with codecs, in which kernels of peers read.
class DeviceGroup::Coded final : public coded::Exchange {
 public:
  Coded(DeviceGroup& group, Op op, const CodedArgs& args, const Plan& plan, Stream stream)
      : Exchange(group.rank(), group.size()),
        group_(group),
        plan_(plan),
        stream_(stream),
        call_(group.begin(coded::tag_of(op, args), stream)) {}

  /// Returns the plan of an operation, in segments that fit in a place. Throws Error if it is not
  /// possible.
  static Plan plan(const DeviceGroup& group, Op op, const CodedArgs& args) {
    const int rows = op == Op::reduce_scatter ? group.size() : 1;
    coded::check(name(op), args, static_cast<size_t>(rows));
    for (const Piece& piece : args.pieces) {
      for (const feedback::Feedback* one : {&piece.worker, &piece.owner}) {
        if (*one && !feedback::has_kernels(one->kind)) {
          group.check(op).fail("takes no feedback of the kind momentum; choose residual or decay");
        }
      }
    }
    const size_t all = std::max<size_t>(1, coded::row_numel(args.pieces));
    for (size_t owned = all, shown = all;;) {
      Plan plan = op == Op::all_reduce
                      ? coded::all_reduce_plan(args.pieces, coded::values_of(args.pieces),
                                               group.size(), /*one_shot=*/false, owned, shown)
                      : coded::reduce_scatter_plan(args.pieces, group.size(), owned);
      const size_t results = plan.owned.most_bytes(),
                   most = std::max(results, plan.shown.most_bytes());
      if (most <= group.place_bytes()) return plan;
      size_t& numel = results > group.place_bytes() ? owned : shown;
      if (numel == 1) {
        group.check(op).fail(
            "needs " + std::to_string(most) + " bytes for a payload, but coded_bytes = " +
            std::to_string(group.options_.coded_bytes) + " gives each of " +
            std::to_string(group.size() + 2) + " payloads " + std::to_string(group.place_bytes()) +
            "; make the group with more coded_bytes");
      }
      numel = (numel + 1) / 2;
    }
  }

  size_t stage() const override { return 1; }
  uint8_t* room(Shot shot, int owner, size_t) override { return place(shot, rank(), owner); }
  void put(Shot, int, size_t, size_t) override {}
  void flush(Shot shot) override {
    group_.arrive_wait(call_, stream_);
    has_results_ = shot == Shot::result;
  }
  bool has(Shot shot, int, size_t) override { return shot == Shot::contribution || has_results_; }
  Span<const uint8_t> get(Shot shot, int from, size_t s) override {
    const coded::Segment& segment =
        shot == Shot::shown ? plan_.shown.at(0, s)
                            : plan_.owned.at(shot == Shot::contribution ? rank() : from, s);
    return {place(shot, from, rank()), segment.bytes};
  }

 private:
  /// Returns the place of what a rank has encoded: a contribution, for this owner.
  uint8_t* place(Shot shot, int from, int owner) const {
    const int index = shot == Shot::contribution ? owner : size() + (shot == Shot::shown);
    return group_.coded(from) + static_cast<size_t>(index) * group_.place_bytes();
  }

  DeviceGroup& group_;
  const Plan& plan_;
  const Stream stream_;
  device::DeviceCall call_;
  bool has_results_ = false;  ///< the kernels of a stage after its second barrier are queued
};

size_t DeviceGroup::coded_scratch_bytes(Op op, const CodedArgs& args) const {
  const size_t bytes = Coder::scratch_bytes(args, Coded::plan(*this, op, args));
  return index() < 0 ? 0 : bytes;
}

void DeviceGroup::run_coded(Op op, const CodedArgs& args, void* out, Stream stream,
                            float* found_inf) {
  void* const to = op == Op::all_reduce ? args.data.data : out;
  const device::Guard guard(index_);
  const DefaultArithmetic arithmetic;
  const Plan plan = Coded::plan(*this, op, args);
  const size_t needed = stream.device == Device::cpu ? 0 : Coder::scratch_bytes(args, plan);
  if (stream.scratch.size < needed) {
    check(op).fail("needs " + std::to_string(needed) + " bytes of scratch memory, but the stream " +
                   "has " + std::to_string(stream.scratch.size) + "; ask coded_scratch_bytes()");
  }
  coded::CoderOptions options;
  options.rank = rank_;
  options.divisor = size_;
  options.stream = stream;
  options.found_inf = found_inf;
  options.fixed = true;  // a peer may have left anything, if a barrier fails
  Coder coder(args, to, scratch_, options);
  Coded exchange(*this, op, args, plan, stream);
  coded::TwoShot(exchange, coder, plan).run();
  if (op == Op::reduce_scatter && found_inf) {  // tells all ranks what each owner knows
    const OpTag tag = make_tag(Op::all_reduce, 1, DType::float32, ReduceOp::max);
    device::Runs flag{};
    flag.data[0] = reinterpret_cast<uint8_t*>(found_inf);
    flag.bytes[0] = sizeof(float);
    reduce(tag, choose(sizeof(float)), flag, found_inf, 1.0, stream);
  }
  // Leaves no values in the result if a barrier has failed.
  const size_t numel = coded::row_numel(args.pieces);
  spoil_if_broken(to, numel * size_of(args.data.dtype), found_inf, stream);
}

}  // namespace pycomm
