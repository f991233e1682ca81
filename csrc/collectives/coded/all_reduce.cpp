// Coded all-reduce: two shots for what is recoded, an all-gather for the rest. Both are in transit
// at once. In one shot all is gathered, and every rank does what owners do.
#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/rails.h"
#include "collectives/coded/coded.h"
#include "collectives/coded/coder.h"
#include "collectives/coded/float32_view.h"
#include "collectives/coded/one_shot.h"
#include "collectives/coded/stream.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

bool is_gathered(const CodedArgs& args, const PieceRun& run) {
  return args.pieces[run.piece].codec->combine() == Combine::gather;
}

/// Returns the runs that owners sum, or the others. In one shot there are no owners.
std::vector<PieceRun> pick(const CodedArgs& args, const std::vector<PieceRun>& values,
                           bool one_shot, bool owned) {
  std::vector<PieceRun> result;
  for (const PieceRun& run : values) {
    if ((!one_shot && !is_gathered(args, run)) == owned) result.push_back(run);
  }
  return result;
}

// All-reduce over channels. One rank sends another, in this order: its contributions to what the
// other owns, what it shares with all, and the results that it owns.
class AllReduce {
 public:
  AllReduce(CollectiveContext& context, Algo wanted, const CodedArgs& args,
            const std::vector<PieceRun>& values, int divisor)
      : ex_(context),
        args_(args),
        n_(context.size()),
        me_(context.rank()),
        one_shot_(goes_in_one_shot(args, values, wanted, n_, context.speed())),
        owned_(args.pieces, pick(args, values, one_shot_, true), n_,
               coded_segment(context.segment_bytes(), context.speed()), context.coded_shares()),
        shown_(args.pieces, pick(args, values, one_shot_, false), 1,
               coded_segment(context.segment_bytes(), one_shot_ ? Speed() : context.speed())),
        coder_(args, me_, context.feedback_scratch(), {}, Packing::close, &context.timing()),
        view_(args, args.data.data, divisor, context.feedback_scratch(), &found_inf_),
        outbox_(context),
        decoded_(n_, 0) {
    for (int r = 0; r < n_; r++) inboxes_.emplace_back(context, r);
  }

  bool run() {
    if (ex_.is_group()) ex_.note_algo(one_shot_ ? "one_shot" : "two_shot");
    // There is one place for every owned payload of the bucket: first our contributions, then the
    // results, which cannot arrive before the owner has had the contribution. There is another one
    // for what others send us to own, and for what each rank shares.
    const size_t own = owned_.bytes(me_), shown = shown_.bytes();
    payloads_ = ex_.scratch(owned_.bytes() + n_ * (own + shown));
    incoming_ = payloads_ + owned_.bytes();
    gathered_ = incoming_ + n_ * own;
    expect();
    contribute();
    show();
    for (size_t s = 0; s < owned_.count(me_); s++) own_segment(s);
    ex_.wait_until([this] { return decode_arrived(); });
    ex_.wait_all();
    return found_inf_ == 0.0f;
  }

 private:
  const Segment& mine(size_t s) const { return owned_.at(me_, s); }
  uint8_t* payload(const Segment& segment) const { return payloads_ + segment.payload; }
  uint8_t* incoming(int rank, size_t s) const {
    return incoming_ + rank * owned_.bytes(me_) + (mine(s).payload - mine(0).payload);
  }
  uint8_t* gathered(int rank, size_t s) const {
    return gathered_ + rank * shown_.bytes() + shown_.at(0, s).payload;
  }
  // Number of a payload in an inbox; our contribution s has the number s.
  size_t shown_number(size_t s) const { return owned_.count(me_) + s; }
  size_t result_number(size_t s) const { return owned_.count(me_) + shown_.count(0) + s; }

  void expect() {
    for (int i = 1; i < n_; i++) {
      const int peer = ex_.after(i);
      const auto next = [&](const Segment& segment, uint8_t* to) {
        inboxes_[peer].expect(to, segment.bytes, segment.variable);
      };
      for (size_t s = 0; s < owned_.count(me_); s++) next(mine(s), incoming(peer, s));
      for (size_t s = 0; s < shown_.count(0); s++) next(shown_.at(0, s), gathered(peer, s));
      for (size_t s = 0; s < owned_.count(peer); s++) {
        next(owned_.at(peer, s), payload(owned_.at(peer, s)));
      }
    }
  }

  // Encodes segment by segment for all owners in turn: one is encoded while those before it are
  // sent.
  void contribute() {
    size_t most = 0;
    for (int r = 0; r < n_; r++) most = std::max(most, owned_.count(r));
    for (size_t s = 0; s < most; s++) {
      for (int i = 1; i <= n_; i++) {
        const int owner = ex_.after(i);
        if (s >= owned_.count(owner)) continue;
        const Segment& segment = owned_.at(owner, s);
        const Span<const PieceRun> runs = owned_.runs(segment);
        const size_t bytes = coder_.encode(Hop::worker, runs, view_.read(runs), payload(segment));
        if (owner == me_) {
          own_bytes_.push_back(bytes);
        } else {
          outbox_.send(owner, payload(segment), bytes, segment.variable);
          ex_.progress();
        }
      }
    }
  }

  void show() {
    for (size_t s = 0; s < shown_.count(0); s++) {
      const Segment& segment = shown_.at(0, s);
      uint8_t* out = gathered(me_, s);
      const Span<const PieceRun> runs = shown_.runs(segment);
      shown_bytes_.push_back(coder_.encode(Hop::worker, runs, view_.read(runs), out));
      send_to_all(segment, out, shown_bytes_[s]);
    }
  }

  // A float32 sum accumulates in the data themselves: our contribution there is encoded by now.
  void own_segment(size_t s) {
    const Segment& segment = mine(s);
    const Span<const PieceRun> runs = owned_.runs(segment);
    for (int i = 1; i < n_; i++) {
      ex_.wait_until([&] {
        decode_arrived();
        return inboxes_[ex_.after(i)].arrived(s);
      });
    }
    const Floats sum = view_.room(runs);
    for (int r = 0; r < n_; r++) {
      const Span<const uint8_t> in =
          r == me_ ? Span<const uint8_t>(payload(segment), own_bytes_[s]) : inboxes_[r].payload(s);
      coder_.decode(runs, in, sum, r > 0, ex_.member(r));
    }
    const size_t bytes = recode(runs, sum, payload(segment));
    send_to_all(segment, payload(segment), bytes);
    decode_result(runs, {payload(segment), bytes}, me_);
  }

  // Encodes a sum as its owner does. Returns the bytes.
  size_t recode(Span<const PieceRun> runs, Floats sum, uint8_t* out) {
    view_.average(runs, sum);
    return coder_.encode(Hop::owner, runs, sum, out);
  }

  void send_to_all(const Segment& segment, const uint8_t* payload, size_t bytes) {
    for (int i = 1; i < n_; i++) outbox_.send(ex_.after(i), payload, bytes, segment.variable);
    ex_.progress();
  }

  // Decodes what has arrived; returns true once all has.
  bool decode_arrived() {
    bool all = decode_shown();
    for (int i = 1; i < n_; i++) {
      const int owner = ex_.after(i);
      Inbox& inbox = inboxes_[owner];
      size_t& s = decoded_[owner];
      for (; s < owned_.count(owner) && inbox.arrived(result_number(s)); s++) {
        decode_result(owned_.runs(owned_.at(owner, s)), inbox.payload(result_number(s)), owner);
      }
      all &= s == owned_.count(owner);
    }
    return all;
  }

  void decode_result(Span<const PieceRun> runs, Span<const uint8_t> in, int owner) {
    const Floats result = view_.room(runs);
    coder_.decode(runs, in, result, false, ex_.member(owner));
    view_.finish_result(runs, result);
  }

  // Decodes in rank order. Our own values there are encoded.
  bool decode_shown() {
    for (; next_shown_ < shown_bytes_.size(); next_shown_++) {
      const size_t s = next_shown_, number = shown_number(s);
      for (int i = 1; i < n_; i++) {
        if (!inboxes_[ex_.after(i)].arrived(number)) return false;
      }
      const Span<const PieceRun> runs = shown_.runs(shown_.at(0, s));
      const Floats sum = view_.room(runs);
      for (int r = 0; r < n_; r++) {
        const Span<const uint8_t> in = r == me_
                                           ? Span<const uint8_t>(gathered(r, s), shown_bytes_[s])
                                           : inboxes_[r].payload(number);
        coder_.decode(runs, in, sum, r > 0, ex_.member(r));
      }
      if (one_shot_) {
        uint8_t* const out = gathered(ex_.after(1), s);  // it has been decoded
        decode_result(runs, {out, recode(runs, sum, out)}, me_);
      } else {
        view_.finish_sum(runs, sum);
      }
    }
    return next_shown_ == shown_.count(0);
  }

  CollectiveContext& ex_;
  const CodedArgs& args_;
  const int n_, me_;
  const bool one_shot_;
  const BucketLayout owned_;  // a chunk for each rank
  const BucketLayout shown_;  // the same for all
  const Coder coder_;
  float found_inf_ = 0.0f;
  const Float32View view_;
  std::deque<Inbox> inboxes_;  // per rank
  Outbox outbox_;
  uint8_t* payloads_ = nullptr;
  uint8_t* incoming_ = nullptr;
  uint8_t* gathered_ = nullptr;
  std::vector<size_t> own_bytes_;    // of our contributions to ourselves
  std::vector<size_t> shown_bytes_;  // of what we share
  std::vector<size_t> decoded_;      // per owner: segments of the result
  size_t next_shown_ = 0;
};

// All-reduce node by node: the node's exact sum, of which the rank at each place has a shard; coded
// all-reduces of the shards between the nodes; and an all-gather of the shards in the node. A node
// has the role of a rank in the coding: its residual lies on the rank that has coded the shard.
bool by_nodes(CollectiveContext& context, Algo wanted, const CodedArgs& args,
              const std::vector<PieceRun>& values) {
  Node node(context);
  const int shards = context.topology().narrowest();
  std::vector<ConstPart> inputs;
  std::vector<Part> outputs;
  auto* place = static_cast<float*>(args.data.data);
  std::vector<PieceRun> ours;
  for (int p = 0; p < node.size(); p++) {
    const std::vector<PieceRun> shard =
        p < shards ? share_of(args.pieces, values, shards, p) : std::vector<PieceRun>();
    inputs.push_back({place, numel_of(shard)});
    outputs.push_back({place, numel_of(shard)});
    if (p == node.place()) ours = shard;
    place += numel_of(shard);
  }
  void* const own = outputs[node.place()].data;
  node.reduce_scatter(ConstParts(inputs).of(sizeof(float)), own, {DType::float32, ReduceOp::sum});
  if (node.place() < shards) {
    const std::vector<int> members = hierarchical::rail(context.topology(), node.place());
    CollectiveContext rail = context.among(members);
    AllReduce(rail, wanted, args, ours, context.size()).run();
  }
  node.all_gather(own, Parts(outputs).of(sizeof(float)));
  node.end();
  return all_finite({static_cast<float*>(args.data.data), args.data.size});
}

// Widens the buffer: the exact sum of a node is float32 as a whole.
bool by_nodes_wide(CollectiveContext& context, Algo wanted, CodedArgs args,
                   const std::vector<PieceRun>& values) {
  const Values bucket = args.data;
  const std::unique_ptr<float[]> wide(bucket.dtype == DType::float32 ? nullptr
                                                                     : new float[bucket.size]);
  ConvertArgs widen;
  if (wide) {
    widen.in = bucket.data;
    widen.from = bucket.dtype;
    widen.out = args.data.data = wide.get();
    args.data.dtype = DType::float32;
    widen.numel = bucket.size;
    convert(widen);
  }
  bool finite = by_nodes(context, wanted, args, values);
  if (wide) {
    float found_inf = 0.0f;
    ConvertArgs narrow = widen;
    std::swap(narrow.from, narrow.to);
    narrow.in = wide.get();
    narrow.out = bucket.data;
    narrow.found_inf = &found_inf;
    convert(narrow);
    finite = found_inf == 0.0f;
  }
  return finite;
}

}  // namespace

bool all_reduce(CollectiveContext& context, Algo wanted, const CodedArgs& args) {
  const std::vector<PieceRun> values = values_of(args.pieces);
  if (dispatch::by_levels(context, wanted)) return by_nodes_wide(context, wanted, args, values);
  return AllReduce(context, wanted, args, values, context.size()).run();
}

}  // namespace pycomm::coded
