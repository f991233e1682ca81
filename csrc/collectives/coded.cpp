#include "collectives/coded.h"

#include "collectives/schedule.h"
#include "collectives/select.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

using schedule::Range;
using schedule::Run;

// What travels at once of one owner's chunk: the payloads of its runs, one behind the other.
struct Segment {
  Range elements;  // of the bucket
  size_t first_run, last_run;
  size_t payload;  // place among all payloads of the bucket
  size_t bytes;
};

// The whole bucket, cut: the same on every rank.
class Layout {
 public:
  Layout(const CodedArgs& args, int ranks, size_t segment_numel) {
    std::vector<schedule::Part> parts;
    parts.reserve(args.pieces.size);
    for (const Piece& p : args.pieces) parts.push_back({p.offset, p.numel, p.codec->granule()});
    const Span<const schedule::Part> all(parts.data(), parts.size());
    for (int r = 0; r < ranks; r++) {
      first_.push_back(segments_.size());
      const Range chunk = schedule::chunk(all, args.data.size, ranks, r);
      for (const Range& range : schedule::segments(all, chunk, segment_numel)) {
        const size_t first_run = runs_.size();
        schedule::append_runs(all, range, runs_);
        size_t bytes = 0;
        for (size_t i = first_run; i < runs_.size(); i++) {
          bytes += args.pieces[runs_[i].part].codec->encoded_bytes(runs_[i].numel);
        }
        segments_.push_back({range, first_run, runs_.size(), bytes_, bytes});
        bytes_ += bytes;
      }
    }
    first_.push_back(segments_.size());
  }

  size_t count(int owner) const { return first_[owner + 1] - first_[owner]; }
  const Segment& at(int owner, size_t s) const { return segments_[first_[owner] + s]; }
  const Run& run(size_t i) const { return runs_[i]; }
  size_t bytes() const { return bytes_; }
  size_t bytes(int owner) const {
    return count(owner) == 0 ? 0 : place(first_[owner + 1]) - place(first_[owner]);
  }

 private:
  size_t place(size_t s) const { return s < segments_.size() ? segments_[s].payload : bytes_; }

  std::vector<Run> runs_;
  std::vector<Segment> segments_;
  std::vector<size_t> first_;  // per owner, and the end
  size_t bytes_ = 0;
};

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
        layout_(args, n_, coded_segment(ex.segment_bytes())),
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
    const uint64_t seed = hop_seed(args_.seed, me_);
    for (size_t s = 0; s < most; s++) {
      for (int i = 1; i <= n_; i++) {
        const int owner = ex_.after(i);
        if (s >= layout_.count(owner)) continue;
        const Segment& segment = layout_.at(owner, s);
        encode(segment, &Piece::residual, &Piece::new_residual, seed);
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
    for (int r = 0; r < n_; r++)
      decode(segment, r == me_ ? payload(segment) : incoming(r, s), r > 0);
    if (args_.average) {
      divide(args_.data.data + segment.elements.begin, segment.elements.size(),
             static_cast<float>(n_));
    }
    encode(segment, &Piece::owner_residual, &Piece::new_owner_residual, hop_seed(args_.seed, -1));
    for (int i = 1; i < n_; i++) ex_.send(ex_.after(i), payload(segment), segment.bytes);
    ex_.progress();
    decode_result(segment);
  }

  // Decodes the results that are there; true once all are.
  bool decode_results() {
    bool all = true;
    for (int i = 1; i < n_; i++) {
      const int owner = ex_.after(i);
      size_t& s = decoded_[owner];
      for (; s < layout_.count(owner) && ex_.received(owner, results_[owner][s]); s++) {
        decode_result(layout_.at(owner, s));
      }
      all &= s == layout_.count(owner);
    }
    return all;
  }

  void decode_result(const Segment& segment) {
    decode(segment, payload(segment), false);
    finite_ &= all_finite(args_.data.sub(segment.elements.begin, segment.elements.size()));
  }

  void encode(const Segment& segment, const float* Piece::* residual, float* Piece::* new_residual,
              uint64_t seed) const {
    uint8_t* out = payload(segment);
    for (size_t i = segment.first_run; i < segment.last_run; i++) {
      const Run& run = layout_.run(i);
      const Piece& piece = args_.pieces[run.part];
      EncodeArgs args;
      args.in = args_.data.sub(piece.offset + run.offset, run.numel);
      args.out = {out, piece.codec->encoded_bytes(run.numel)};
      if (piece.*residual) {
        args.residual = piece.*residual + run.offset;
        args.new_residual = piece.*new_residual + run.offset;
      }
      args.key = {seed, args_.step, piece.tensor};
      args.index = run.offset;
      piece.codec->encode(args);
      out += args.out.size;
    }
  }

  void decode(const Segment& segment, const uint8_t* in, bool add) const {
    for (size_t i = segment.first_run; i < segment.last_run; i++) {
      const Run& run = layout_.run(i);
      const Piece& piece = args_.pieces[run.part];
      const Span<float> out = args_.data.sub(piece.offset + run.offset, run.numel);
      const Span<const uint8_t> payload(in, piece.codec->encoded_bytes(run.numel));
      if (add) {
        piece.codec->decode_add(payload, out, {});
      } else {
        piece.codec->decode(payload, out, {});
      }
      in += payload.size;
    }
  }

  Exchange& ex_;
  const CodedArgs& args_;
  const int n_, me_;
  const Layout layout_;
  uint8_t* payloads_;
  uint8_t* incoming_;
  std::vector<size_t> decoded_;                       // per owner: segments of the result
  std::vector<std::vector<uint64_t>> results_;        // per owner: tickets
  std::vector<std::vector<uint64_t>> contributions_;  // per rank: tickets of our chunk's segments
  bool finite_ = true;
};

// FNV-1a (Fowler, Noll, Vo), 64 bits.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
      value_ = (value_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
    }
  }
  void add(uint64_t x) { add(&x, sizeof x); }
  uint32_t value() const { return static_cast<uint32_t>(value_ ^ value_ >> 32); }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

}  // namespace

void check(const CodedArgs& args) {
  size_t end = 0;
  const auto fail = [](size_t piece, const std::string& what) {
    throw Error("all_reduce_coded: piece " + std::to_string(piece) + " " + what);
  };
  for (size_t i = 0; i < args.pieces.size; i++) {
    const Piece& p = args.pieces[i];
    if (p.offset != end) {
      fail(i, "starts at " + std::to_string(p.offset) + ", but the one before it ends at " +
                  std::to_string(end) + "; pieces must follow each other without gaps");
    }
    if (!p.codec) fail(i, "has no codec");
    if (p.codec->combine() == Combine::gather) {
      fail(i, "has codec " + p.codec->spec() + ", whose payloads can only be gathered");
    }
    if (!p.residual != !p.new_residual || !p.owner_residual != !p.new_owner_residual) {
      fail(i, "has a residual to read but none to write, or the other way round");
    }
    end += p.numel;
  }
  if (end != args.data.size) {
    throw Error("all_reduce_coded: the pieces cover " + std::to_string(end) + " elements of " +
                std::to_string(args.data.size));
  }
}

uint32_t signature(const CodedArgs& args) {
  Hash hash;
  const Codec* last = nullptr;
  for (const Piece& p : args.pieces) {
    if (p.codec != last) {
      const std::string spec = p.codec->spec();
      hash.add(spec.data(), spec.size());
      hash.add(static_cast<uint64_t>(p.codec->wire_version()));
      last = p.codec;
    }
    hash.add(p.numel);
    hash.add(p.tensor);
  }
  hash.add(args.average);
  hash.add(args.seed);
  hash.add(args.step);
  const uint32_t value = hash.value();
  return value ? value : 1;
}

std::string label(const CodedArgs& args) {
  const Piece* largest = nullptr;
  for (const Piece& p : args.pieces) {
    if (!largest || p.numel > largest->numel) largest = &p;
  }
  return largest ? largest->codec->spec() : "";
}

uint64_t hop_seed(uint64_t seed, int rank) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * static_cast<uint64_t>(rank + 2);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

bool all_reduce(Exchange& ex, const CodedArgs& args) {
  ex.note_algo("two_shot");
  return AllReduce(ex, args).run();
}

}  // namespace pycomm::coded
