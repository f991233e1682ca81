// Collectives with codecs on GPUs: kernels of the codecs, which write where the reader will find it
// and read where the writer left it, and meetings between them. As on the CPU (coded.h), with the
// same bytes; no byte moves but in an encode or a decode.
//
// Beside the slots of the exact kernels each rank shows places of one size:
//
//   inbox of each rank | result | own | numbers
//
// An operation goes in stages, as much as fits, of two meetings each:
//
//   encode contributions into the owners' inboxes -> meet -> decode ours in rank order, divide,
//   encode into `result`; encode what is gathered into `own` -> meet -> decode what all show
//
// Inboxes are read between the two meetings and the rest behind the second, so none of them is
// written while it is read: the next stage writes inboxes behind the second meeting and the rest
// behind its first.
#include <algorithm>

#include "collectives/coded.h"
#include "collectives/coded_agree.h"
#include "collectives/coded_coder.h"
#include "collectives/device_group_impl.h"

namespace pycomm {
namespace {

using coded::Agreed;
using coded::Coder;
using coded::Hop;
using coded::Layout;
using coded::Run;
using coded::Segment;

constexpr size_t kAlign = 256;
constexpr auto kAll = [](Combine) { return true; };
constexpr auto kRecoded = [](Combine combine) { return combine == Combine::recode; };
constexpr auto kUndivided = [](Combine combine) { return combine != Combine::recode; };

std::vector<Run> pick(const CodedArgs& args, bool gathered) {
  std::vector<Run> result;
  for (const Run& run : coded::values_of(args.pieces)) {
    const bool is = args.pieces[run.piece].codec->combine() == Combine::gather;
    if (is == gathered) result.push_back(run);
  }
  return result;
}

size_t row_numel(const CodedArgs& args) {
  return args.pieces.size == 0 ? 0 : args.pieces.end()[-1].offset + args.pieces.end()[-1].numel;
}

void divide(const CodedArgs& args, Span<const Run> runs, float* values, int by, Stream stream,
            bool (*choose)(Combine)) {
  if (!args.average) return;
  for (const Run& run : runs) {
    const Piece& piece = args.pieces[run.piece];
    if (!choose(piece.codec->combine())) continue;
    device::divide({values + piece.offset + run.offset, run.numel}, static_cast<float>(by), stream);
  }
}

}  // namespace

/// One operation with codecs.
class DeviceGroup::Impl::Coded {
 public:
  /// `rows` of the data, of which each rank encodes all or its own.
  Coded(Impl& group, Op op, const CodedArgs& args, size_t rows, Stream stream)
      : group_(group),
        op_(op),
        args_(args),
        stream_(stream),
        n_(group.size()),
        me_(group.rank()),
        place_bytes_(group.coded_bytes() / (n_ + 3) / kAlign * kAlign),
        values_(coded::values_of(args.pieces)),
        agreed_(args, values_, row_numel(args), rows),
        coder_(args, &agreed_, me_, n_, group.scratch(), stream, coded::Packing::fixed) {
    coded::check(name(op), args, rows);
    if (group.index() >= 0) check_feedback();
    OpTag tag;
    tag.op = op;
    tag.numel = args.data.size;
    tag.redop = args.average ? ReduceOp::avg : ReduceOp::sum;
    tag.codec = coded::signature(args);
    coded::label(args).copy(tag.label, sizeof tag.label - 1);
    call_ = group.begin(tag, stream);
  }

  void all_reduce() {
    agree();
    const Layout owned = layout(pick(args_, false), n_), shown = layout(pick(args_, true), 1);
    size_t stages = shown.count(0);
    for (int r = 0; r < n_; r++) stages = std::max(stages, owned.count(r));
    for (size_t s = 0; s < stages; s++) {
      for (int i = 1; i <= n_; i++) {
        const int owner = (me_ + i) % n_;  // not all to the same rank at once
        if (s < owned.count(owner)) encode(Hop::worker, owned, owner, s, data(), inbox(owner, me_));
      }
      meet();
      if (s < owned.count(me_)) {
        sum(owned, me_, s, [&](int r) { return inbox(me_, r); }, data());
        divide(args_, owned.runs(owned.at(me_, s)), data(), n_, stream_, kRecoded);
        encode(Hop::owner, owned, me_, s, data(), result(me_));
      }
      if (s < shown.count(0)) encode(Hop::worker, shown, 0, s, data(), own(me_));
      meet();
      for (int i = 0; i < n_; i++) {
        const int owner = (me_ + i) % n_;
        if (s >= owned.count(owner)) continue;
        decode(owned, owner, s, result(owner), data(), false);
        divide(args_, owned.runs(owned.at(owner, s)), data(), n_, stream_, kUndivided);
      }
      if (s < shown.count(0)) {
        sum(shown, 0, s, [&](int r) { return own(r); }, data());
        divide(args_, shown.runs(shown.at(0, s)), data(), n_, stream_, kUndivided);
      }
    }
  }

  void reduce_scatter(float* out) {
    agree();
    const Layout layout = this->layout(values_, 1);
    for (size_t s = 0; s < layout.count(0); s++) {
      for (int i = 1; i <= n_; i++) {
        const int owner = (me_ + i) % n_;
        const float* const row = data() + static_cast<size_t>(owner) * row_numel(args_);
        encode(Hop::worker, layout, 0, s, row, inbox(owner, me_), static_cast<size_t>(owner));
      }
      meet();
      sum(layout, 0, s, [&](int r) { return inbox(me_, r); }, out);
      divide(args_, layout.runs(layout.at(0, s)), out, n_, stream_, kAll);
      meet();
    }
  }

  void all_gather(float* out) {
    const Layout layout = this->layout(values_, 1);
    for (size_t s = 0; s < layout.count(0); s++) {
      meet();
      const Coder alone(args_, nullptr, me_, n_, group_.scratch(), stream_, coded::Packing::fixed);
      alone.encode(Hop::worker, layout.runs(layout.at(0, s)), data(), own(me_));
      meet();
      for (int i = 0; i < n_; i++) {
        const int r = (me_ + i) % n_;
        decode(layout, 0, s, own(r), out + static_cast<size_t>(r) * row_numel(args_), false);
      }
    }
  }

 private:
  // Codecs with other feedback keep what they work on in memory of the host.
  void check_feedback() const {
    for (const Piece& piece : args_.pieces) {
      for (const feedback::Feedback* one : {&piece.worker, &piece.owner}) {
        const bool plain = one->kind == feedback::Kind::residual &&
                           one->storage == feedback::Storage::float32 && !one->momentum;
        if (*one && !plain) {
          group_.fail(op_, "on a GPU takes feedback of kind residual in float32 only");
        }
      }
      if (piece.mean) group_.fail(op_, "on a GPU has no EF21");
      if (piece.codec->agrees() && op_ == Op::all_gather) {
        group_.fail(op_, "on a GPU does not take " + piece.codec->spec());
      }
    }
  }

  float* data() const { return args_.data.data; }
  uint8_t* place(int rank, int index) const {
    return group_.coded(rank) + static_cast<size_t>(index) * place_bytes_;
  }
  uint8_t* inbox(int rank, int from) const { return place(rank, from); }
  uint8_t* result(int rank) const { return place(rank, n_); }
  uint8_t* own(int rank) const { return place(rank, n_ + 1); }
  float* numbers() const { return reinterpret_cast<float*>(place(me_, n_ + 2)); }

  void meet() { group_.meet(call_, stream_); }

  void agree() {
    if (agreed_.count() == 0) return;
    if (agreed_.count() * sizeof(float) > place_bytes_) too_large(agreed_.count() * sizeof(float));
    agreed_.put(numbers());
    agreed_.measure(stream_, group_.scratch());
    OpTag tag;
    tag.op = Op::all_reduce;
    tag.numel = agreed_.count();
    tag.redop = ReduceOp::max;
    const device::ReduceAlgo algo = group_.choose(tag.numel * sizeof(float));
    group_.all_reduce(agreed_.numbers(), tag, algo, 1.0, stream_);
  }

  /// In segments of which each fits in a place.
  Layout layout(const std::vector<Run>& values, int owners) const {
    for (size_t numel = std::max<size_t>(1, coded::numel_of(values));; numel = (numel + 1) / 2) {
      Layout layout(args_.pieces, values, owners, numel);
      size_t most = 0;
      for (int r = 0; r < owners; r++) {
        for (size_t s = 0; s < layout.count(r); s++) {
          most = std::max(most, layout.at(r, s).bytes);
        }
      }
      if (most <= place_bytes_) return layout;
      if (numel == 1) too_large(most);
    }
  }
  [[noreturn]] void too_large(size_t bytes) const {
    group_.fail(op_, "needs places of " + std::to_string(bytes) + " bytes, but of coded_bytes = " +
                         std::to_string(group_.coded_bytes()) + " one of " +
                         std::to_string(n_ + 3) + " has " + std::to_string(place_bytes_));
  }

  void encode(Hop hop, const Layout& layout, int owner, size_t s, const float* values, uint8_t* out,
              size_t row = 0) const {
    coder_.encode(hop, layout.runs(layout.at(owner, s)), values, out, row);
  }
  void decode(const Layout& layout, int owner, size_t s, const uint8_t* payload, float* values,
              bool add) const {
    const Segment& segment = layout.at(owner, s);
    coder_.decode(layout.runs(segment), {payload, segment.bytes}, values, add, owner);
  }
  /// In rank order.
  template <typename Payload>
  void sum(const Layout& layout, int owner, size_t s, const Payload& payload, float* values) const {
    for (int r = 0; r < n_; r++) decode(layout, owner, s, payload(r), values, r > 0);
  }

  Impl& group_;
  const Op op_;
  const CodedArgs& args_;
  const Stream stream_;
  const int n_, me_;
  const size_t place_bytes_;
  const std::vector<Run> values_;
  Agreed agreed_;
  const Coder coder_;
  device::Call call_;
};

void DeviceGroup::all_reduce_coded(const CodedArgs& args, Stream stream) {
  const device::Guard guard(index());
  Impl::Coded(*impl_, Op::all_reduce, args, 1, stream).all_reduce();
}

void DeviceGroup::reduce_scatter_coded(const CodedArgs& args, float* out, Stream stream) {
  const device::Guard guard(index());
  Impl::Coded(*impl_, Op::reduce_scatter, args, static_cast<size_t>(size()), stream)
      .reduce_scatter(out);
}

void DeviceGroup::all_gather_coded(const CodedArgs& args, float* out, Stream stream) {
  const device::Guard guard(index());
  Impl::Coded(*impl_, Op::all_gather, args, 1, stream).all_gather(out);
}

}  // namespace pycomm
