// Collectives with codecs on GPUs: kernels of the codecs, which write into memory of their own rank
// and read peers' memory in place, and barriers between them. They work as on the CPU (coded.h),
// with the same bytes; bytes only move in an encode or a decode.
//
// Beside the slots of the exact kernels each rank shares places of one size:
//
//   for each rank | result | own
//
// An operation runs in stages, each as large as fits, with two barriers each:
//
//   encode contributions for their owners -> barrier -> owners read theirs in rank order, divide,
//   encode into `result`; encode what is gathered into `own` -> barrier -> decode what all share
//
// Data for an owner are read between the two barriers and the rest after the second, so nothing is
// written while it is read: the next stage writes the former after the second barrier and the rest
// after its first.
//
// Kernels that are queued after a barrier that fails run all the same, on what is there. Since no
// rank writes into the memory of others, they spoil only results of a group that has failed; the
// last kernel of an operation then overwrites them.
#include <algorithm>

#include "collectives/coded/coder.h"
#include "collectives/coded/float32_view.h"
#include "collectives/device/coded_cuts.h"
#include "core/arithmetic.h"

namespace pycomm {
namespace {

using coded::BucketLayout;
using coded::Coder;
using coded::Float32View;
using coded::Floats;
using coded::Hop;
using coded::PieceRun;
using coded::Segment;

size_t row_numel(const CodedArgs& args) {
  return args.pieces.size == 0 ? 0 : args.pieces.end()[-1].offset + args.pieces.end()[-1].numel;
}

}  // namespace

/// One operation with codecs.
class DeviceGroup::Impl::Coded {
 public:
  /// `rows` of the data, of which each rank encodes all or its own. `out` is the destination of
  /// results.
  Coded(Impl& group, Op op, const CodedArgs& args, void* out, size_t rows, Stream stream,
        float* found_inf)
      : group_(group),
        op_(op),
        args_(args),
        out_{out, args.data.size, args.data.dtype},
        stream_(stream),
        found_inf_(found_inf),
        n_(group.size()),
        me_(group.rank()),
        cuts_(checked(group, op, args, rows)),
        room_(stream.scratch.data ? reinterpret_cast<float*>(stream.scratch.data) : nullptr),
        coder_(args, me_, group.scratch(), of_codecs(), coded::Packing::fixed) {
    OpTag tag;
    tag.op = op;
    tag.numel = args.data.size;
    tag.dtype = args.data.dtype;
    tag.redop = args.average ? ReduceOp::avg : ReduceOp::sum;
    tag.codec = coded::signature(args);
    coded::label(args).copy(tag.label, sizeof tag.label - 1);
    call_ = group.begin(tag, stream);
  }

  void all_reduce() {
    const BucketLayout &owned = cuts_.owned(), &shown = cuts_.shown();
    const Float32View view = view_at(args_.data.data, found_inf_);
    size_t stages = shown.count(0);
    for (int r = 0; r < n_; r++) stages = std::max(stages, owned.count(r));
    for (size_t s = 0; s < stages; s++) {
      for (int i = 1; i <= n_; i++) {
        const int owner = (me_ + i) % n_;  // starts with another owner on each rank
        if (s < owned.count(owner)) encode(owned, owner, s, view, for_owner(me_, owner));
      }
      arrive_wait();
      if (s < owned.count(me_)) {
        const Span<const PieceRun> runs = owned.runs(owned.at(me_, s));
        const Floats total = sum(owned, me_, s, [&](int r) { return for_owner(r, me_); }, view);
        view.average(runs, total);
        coder_.encode(Hop::owner, runs, total, result(me_));
      }
      if (s < shown.count(0)) encode(shown, 0, s, view, own(me_));
      arrive_wait();
      for (int i = 0; i < n_; i++) {
        const int owner = (me_ + i) % n_;
        if (s < owned.count(owner)) take(owned, owner, s, result(owner), view);
      }
      if (s < shown.count(0)) {
        const Floats total = sum(shown, 0, s, [&](int r) { return own(r); }, view);
        view.finish_sum(shown.runs(shown.at(0, s)), total);
      }
    }
    finish(row_numel(args_));
  }

  void reduce_scatter() {
    const BucketLayout& layout = cuts_.shown();
    const Float32View to = view_at(out_.data, found_inf_);
    for (size_t s = 0; s < layout.count(0); s++) {
      for (int i = 1; i <= n_; i++) {
        const auto owner = static_cast<size_t>((me_ + i) % n_);
        const Float32View row = view_at(args_.data.at(owner * row_numel(args_)), nullptr);
        encode(layout, 0, s, row, for_owner(me_, static_cast<int>(owner)), owner);
      }
      arrive_wait();
      const Floats total = sum(layout, 0, s, [&](int r) { return for_owner(r, me_); }, to);
      to.finish_sum(layout.runs(layout.at(0, s)), total);
      arrive_wait();
    }
    if (found_inf_) combine_found_inf();
    finish(row_numel(args_));
  }

  void all_gather() {
    const BucketLayout& layout = cuts_.shown();
    const Float32View from = view_at(args_.data.data, nullptr);
    for (size_t s = 0; s < layout.count(0); s++) {
      arrive_wait();
      encode(layout, 0, s, from, own(me_));
      arrive_wait();
      for (int i = 0; i < n_; i++) {
        const int r = (me_ + i) % n_;
        const Float32View row =
            view_at(out_.at(static_cast<size_t>(r) * row_numel(args_)), found_inf_);
        take(layout, 0, s, own(r), row);
      }
    }
    finish(row_numel(args_) * static_cast<size_t>(n_));
  }

  /// Throws Error if an operation is not possible.
  static Cuts checked(const Impl& group, Op op, const CodedArgs& args, size_t rows) {
    coded::check(name(op), args, rows);
    check_feedback(group, op, args);
    return Cuts(group, op, args);
  }

 private:
  static void check_feedback(const Impl& group, Op op, const CodedArgs& args) {
    for (const Piece& piece : args.pieces) {
      for (const feedback::Feedback* one : {&piece.worker, &piece.owner}) {
        if (*one && !feedback::has_kernels(one->kind)) {
          group.fail(op, "takes no feedback of the kind momentum; choose residual or decay");
        }
      }
    }
  }

  /// Returns the stream with the scratch memory of codecs.
  Stream of_codecs() const {
    if (stream_.device == Device::cpu) return stream_;
    if (stream_.scratch.size < cuts_.scratch_bytes()) {
      group_.fail(op_, "needs " + std::to_string(cuts_.scratch_bytes()) +
                           " bytes of scratch memory, but the stream has " +
                           std::to_string(stream_.scratch.size) + "; ask coded_scratch_bytes()");
    }
    Stream stream = stream_;
    const size_t float32_bytes = cuts_.float32_bytes();
    stream.scratch = stream_.scratch.sub(float32_bytes, stream_.scratch.size - float32_bytes);
    return stream;
  }
  Float32View view_at(const void* values, float* found_inf) const {
    return {args_, values, n_, group_.scratch(), found_inf, stream_, room_};
  }

  uint8_t* place(int rank, int index) const {
    return group_.coded(rank) + static_cast<size_t>(index) * cuts_.place_bytes();
  }
  /// Returns the place of what a rank has encoded for the owner of a chunk.
  uint8_t* for_owner(int rank, int owner) const { return place(rank, owner); }
  uint8_t* result(int rank) const { return place(rank, n_); }
  uint8_t* own(int rank) const { return place(rank, n_ + 1); }

  void arrive_wait() { group_.arrive_wait(call_, stream_); }
  /// Leaves no values in this many results if a barrier has failed.
  void finish(size_t numel) {
    group_.spoil_if_broken(out_.data, numel * size_of(out_.dtype), found_inf_, stream_);
  }

  /// Tells all ranks what each owner knows.
  void combine_found_inf() {
    OpTag tag;
    tag.op = Op::all_reduce;
    tag.numel = 1;
    tag.redop = ReduceOp::max;
    group_.all_reduce(found_inf_, tag, group_.choose(sizeof(float)), 1.0, stream_);
  }

  void encode(const BucketLayout& layout, int owner, size_t s, const Float32View& from,
              uint8_t* out, size_t row = 0) const {
    const Span<const PieceRun> runs = layout.runs(layout.at(owner, s));
    coder_.encode(Hop::worker, runs, from.read(runs), out, row);
  }
  void decode(const BucketLayout& layout, int owner, size_t s, const uint8_t* payload,
              Floats values, bool add) const {
    const Segment& segment = layout.at(owner, s);
    coder_.decode(layout.runs(segment), {payload, segment.bytes}, values, add, owner);
  }
  /// Decodes one payload that is the result.
  void take(const BucketLayout& layout, int owner, size_t s, const uint8_t* payload,
            const Float32View& to) const {
    const Span<const PieceRun> runs = layout.runs(layout.at(owner, s));
    const Floats values = to.room(runs);
    decode(layout, owner, s, payload, values, false);
    to.finish_result(runs, values);
  }
  /// Decodes payloads in rank order.
  template <typename Payload>
  Floats sum(const BucketLayout& layout, int owner, size_t s, const Payload& payload,
             const Float32View& at) const {
    const Floats values = at.room(layout.runs(layout.at(owner, s)));
    for (int r = 0; r < n_; r++) decode(layout, owner, s, payload(r), values, r > 0);
    return values;
  }

  Impl& group_;
  const Op op_;
  const CodedArgs& args_;
  const Values out_;
  const Stream stream_;
  float* const found_inf_;
  const int n_, me_;
  const Cuts cuts_;
  float* const room_;
  const Coder coder_;
  device::DeviceCall call_;
};

size_t DeviceGroup::coded_scratch_bytes(Op op, const CodedArgs& args) const {
  const size_t rows = op == Op::reduce_scatter ? static_cast<size_t>(size()) : 1;
  const size_t bytes = Impl::Coded::checked(*impl_, op, args, rows).scratch_bytes();
  return index() < 0 ? 0 : bytes;
}

void DeviceGroup::all_reduce_coded(const CodedArgs& args, Stream stream, float* found_inf) {
  const device::Guard guard(index());
  const DefaultArithmetic arithmetic;
  Impl::Coded(*impl_, Op::all_reduce, args, args.data.data, 1, stream, found_inf).all_reduce();
}

void DeviceGroup::reduce_scatter_coded(const CodedArgs& args, void* out, Stream stream,
                                       float* found_inf) {
  const device::Guard guard(index());
  const DefaultArithmetic arithmetic;
  const auto rows = static_cast<size_t>(size());
  Impl::Coded(*impl_, Op::reduce_scatter, args, out, rows, stream, found_inf).reduce_scatter();
}

void DeviceGroup::all_gather_coded(const CodedArgs& args, void* out, Stream stream,
                                   float* found_inf) {
  const device::Guard guard(index());
  const DefaultArithmetic arithmetic;
  Impl::Coded(*impl_, Op::all_gather, args, out, 1, stream, found_inf).all_gather();
}

}  // namespace pycomm
