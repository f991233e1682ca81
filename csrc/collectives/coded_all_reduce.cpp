// The coded all-reduce in two shots.
#include "collectives/coded.h"
#include "collectives/coded_coder.h"
#include "collectives/select.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

PYCOMM_SIMD void divide(float* x, size_t n, float by) {
  for (size_t i = 0; i < n; i++) x[i] = x[i] / by;
}

class AllReduce {
 public:
  AllReduce(Exchange& ex, const CodedArgs& args)
      : ex_(ex),
        args_(args),
        n_(ex.size()),
        me_(ex.rank()),
        layout_(args.pieces, values_of(args.pieces, [](const Codec&) { return true; }), n_,
                coded_segment(ex.segment_bytes())),
        coder_(args, me_, n_),
        decoded_(n_, 0),
        results_(n_),
        contributions_(n_) {
    // One place for every payload of the bucket: first our contributions, then the results, which
    // cannot come before the owner has had the contribution. And one for what others send us to
    // own.
    const size_t own = layout_.bytes(me_);
    payloads_ = ex.scratch(layout_.bytes() + n_ * own);
    incoming_ = payloads_ + layout_.bytes();
  }

  bool run() {
    post_receives();
    contribute();
    for (size_t s = 0; s < layout_.count(me_); s++) own(s);
    ex_.wait_until([this] { return decode_results(); });
    ex_.wait_all();
    return finite_;
  }

 private:
  const Segment& mine(size_t s) const { return layout_.at(me_, s); }
  uint8_t* payload(const Segment& segment) const { return payloads_ + segment.payload; }
  uint8_t* incoming(int rank, size_t s) const {
    return incoming_ + rank * layout_.bytes(me_) + (mine(s).payload - mine(0).payload);
  }

  void post_receives() {
    for (int i = 1; i < n_; i++) {
      const int peer = ex_.after(i);
      for (size_t s = 0; s < layout_.count(me_); s++) {
        contributions_[peer].push_back(ex_.recv(peer, incoming(peer, s), mine(s).bytes));
      }
      for (size_t s = 0; s < layout_.count(peer); s++) {
        const Segment& segment = layout_.at(peer, s);
        results_[peer].push_back(ex_.recv(peer, payload(segment), segment.bytes));
      }
    }
  }

  // Segment by segment to all owners in turn: one is encoded while those before it are sent.
  void contribute() {
    size_t most = 0;
    for (int r = 0; r < n_; r++) most = std::max(most, layout_.count(r));
    for (size_t s = 0; s < most; s++) {
      for (int i = 1; i <= n_; i++) {
        const int owner = ex_.after(i);
        if (s >= layout_.count(owner)) continue;
        const Segment& segment = layout_.at(owner, s);
        encode(Hop::worker, segment);
        if (owner == me_) continue;
        ex_.send(owner, payload(segment), segment.bytes);
        ex_.progress();
      }
    }
  }

  // The sum grows in `data` itself: our contribution there is encoded by now.
  void own(size_t s) {
    const Segment& segment = mine(s);
    for (int i = 1; i < n_; i++) {
      const int peer = ex_.after(i);
      ex_.wait_until([&] {
        decode_results();
        return ex_.received(peer, contributions_[peer][s]);
      });
    }
    for (int r = 0; r < n_; r++) {
      decode(segment, r == me_ ? payload(segment) : incoming(r, s), r > 0, r);
    }
    divide(segment, false);
    encode(Hop::owner, segment);
    for (int i = 1; i < n_; i++) ex_.send(ex_.after(i), payload(segment), segment.bytes);
    ex_.progress();
    decode_result(segment, me_);
  }

  // Decodes the results that are there; true once all are.
  bool decode_results() {
    bool all = true;
    for (int i = 1; i < n_; i++) {
      const int owner = ex_.after(i);
      size_t& s = decoded_[owner];
      for (; s < layout_.count(owner) && ex_.received(owner, results_[owner][s]); s++) {
        decode_result(layout_.at(owner, s), owner);
      }
      all &= s == layout_.count(owner);
    }
    return all;
  }

  void decode_result(const Segment& segment, int owner) {
    decode(segment, payload(segment), false, owner);
    divide(segment, true);
    finite_ &= finite(segment);
  }

  size_t encode(Hop hop, const Segment& segment) const {
    return coder_.encode(hop, layout_.runs(segment), args_.data.data, payload(segment));
  }
  void decode(const Segment& segment, const uint8_t* in, bool add, int sender) const {
    coder_.decode(layout_.runs(segment), {in, segment.bytes}, args_.data.data, add, sender);
  }
  /// Of the pieces whose codec's combine is `sum`, or of the others.
  void divide(const Segment& segment, bool sums) const {
    if (!args_.average) return;
    for (const Run& run : layout_.runs(segment)) {
      const Piece& piece = args_.pieces[run.piece];
      if ((piece.codec->combine() == Combine::sum) != sums) continue;
      coded::divide(args_.data.data + piece.offset + run.offset, run.numel, static_cast<float>(n_));
    }
  }
  bool finite(const Segment& segment) const {
    for (const Run& run : layout_.runs(segment)) {
      const Piece& piece = args_.pieces[run.piece];
      if (!all_finite(args_.data.sub(piece.offset + run.offset, run.numel))) return false;
    }
    return true;
  }

  Exchange& ex_;
  const CodedArgs& args_;
  const int n_, me_;
  const Layout layout_;
  const Coder coder_;
  uint8_t* payloads_;
  uint8_t* incoming_;
  std::vector<size_t> decoded_;                       // per owner: segments of the result
  std::vector<std::vector<uint64_t>> results_;        // per owner: tickets
  std::vector<std::vector<uint64_t>> contributions_;  // per rank: tickets of our chunk's segments
  bool finite_ = true;
};

}  // namespace

bool all_reduce(Exchange& ex, const CodedArgs& args) {
  ex.note_algo("two_shot");
  return AllReduce(ex, args).run();
}

}  // namespace pycomm::coded
