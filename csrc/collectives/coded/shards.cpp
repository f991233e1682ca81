// Coded reduce_scatter and all_gather: the first and the second shot of an all-reduce. Each rank
// has one row of the same pieces.
#include "collectives/algorithms/dispatch.h"
#include "collectives/coded/coded.h"
#include "collectives/coded/coder.h"
#include "collectives/coded/float32_view.h"
#include "collectives/coded/stream.h"

namespace pycomm::coded {
namespace {

size_t row_numel(const CodedArgs& args) {
  return args.pieces.size == 0 ? 0 : args.pieces.end()[-1].offset + args.pieces.end()[-1].numel;
}

BucketLayout row_layout(const CollectiveContext& context, const CodedArgs& args) {
  return {args.pieces, values_of(args.pieces), 1,
          coded_segment(context.segment_bytes(), context.speed())};
}

/// Combines what each owner knows, so that all ranks have the same answer.
bool all_agree(CollectiveContext& context, bool finite) {
  uint8_t flag = finite;
  dispatch::all_reduce({context, Algo::direct}, &flag, 1, {DType::uint8, ReduceOp::min});
  return flag != 0;
}

}  // namespace

bool reduce_scatter(CollectiveContext& context, const CodedArgs& args, void* out) {
  const int n = context.size(), me = context.rank();
  const size_t row = row_numel(args);
  context.note_algo("one_shot");
  const BucketLayout layout = row_layout(context, args);
  const Coder coder(args, me, context.feedback_scratch(), {}, Packing::close, &context.timing());
  const size_t each = layout.bytes(), count = layout.count(0);

  // Payloads that we send to each owner, then those that each rank sends to us.
  uint8_t* const sent = context.scratch(2 * n * each);
  const auto place = [&](int r, size_t s) { return sent + r * each + layout.at(0, s).payload; };
  const auto arrival = [&](int r, size_t s) { return place(r == me ? r : n + r, s); };
  std::deque<Inbox> inboxes;
  for (int r = 0; r < n; r++) {
    inboxes.emplace_back(context, r);
    for (size_t s = 0; r != me && s < count; s++) {
      inboxes[r].expect(arrival(r, s), layout.at(0, s).bytes, layout.at(0, s).variable);
    }
  }
  Outbox outbox(context);
  std::vector<size_t> own(count);
  for (size_t s = 0; s < count; s++) {
    const Segment& segment = layout.at(0, s);
    const Span<const PieceRun> runs = layout.runs(segment);
    for (int i = 1; i <= n; i++) {
      const int owner = context.after(i);
      const Float32View from(args, args.data.at(owner * row), n, context.feedback_scratch(),
                             nullptr);
      const size_t bytes = coder.encode(Hop::worker, runs, from.read(runs), place(owner, s), owner);
      if (owner == me) {
        own[s] = bytes;
      } else {
        outbox.send(owner, place(owner, s), bytes, segment.variable);
        context.progress();
      }
    }
  }
  float found_inf = 0.0f;
  const Float32View to(args, out, n, context.feedback_scratch(), &found_inf);
  for (size_t s = 0; s < count; s++) {
    const Span<const PieceRun> runs = layout.runs(layout.at(0, s));
    const Floats sum = to.room(runs);
    for (int r = 0; r < n; r++) {
      if (r != me) context.wait_until([&] { return inboxes[r].arrived(s); });
      coder.decode(runs,
                   r == me ? Span<const uint8_t>(place(me, s), own[s]) : inboxes[r].payload(s), sum,
                   r > 0, context.member(r));
    }
    to.finish_sum(runs, sum);
  }
  context.wait_all();
  return all_agree(context, found_inf == 0.0f);
}

bool all_gather(CollectiveContext& context, const CodedArgs& args, void* out) {
  context.note_algo("one_shot");
  const int n = context.size(), me = context.rank();
  const size_t row = row_numel(args);
  const BucketLayout layout = row_layout(context, args);
  const Coder coder(args, me, context.feedback_scratch(), {}, Packing::close, &context.timing());
  const size_t each = layout.bytes(), count = layout.count(0);
  uint8_t* const payloads = context.scratch(n * each);
  const auto place = [&](int r, size_t s) { return payloads + r * each + layout.at(0, s).payload; };
  std::deque<Inbox> inboxes;
  for (int r = 0; r < n; r++) {
    inboxes.emplace_back(context, r);
    for (size_t s = 0; r != me && s < count; s++) {
      inboxes[r].expect(place(r, s), layout.at(0, s).bytes, layout.at(0, s).variable);
    }
  }

  float found_inf = 0.0f;
  const Float32View from(args, args.data.data, n, context.feedback_scratch(), nullptr);
  std::vector<Float32View> to;
  for (int r = 0; r < n; r++) {
    const Values rows{out, row * n, args.data.dtype};
    to.emplace_back(args, rows.at(r * row), n, context.feedback_scratch(), &found_inf);
  }
  const auto decode = [&](int r, size_t s, Span<const uint8_t> payload) {
    const Span<const PieceRun> runs = layout.runs(layout.at(0, s));
    const Floats values = to[r].room(runs);
    coder.decode(runs, payload, values, false, context.member(r));
    to[r].finish_result(runs, values);
  };
  Outbox outbox(context);
  for (size_t s = 0; s < count; s++) {
    const Segment& segment = layout.at(0, s);
    const Span<const PieceRun> runs = layout.runs(segment);
    const size_t bytes = coder.encode(Hop::worker, runs, from.read(runs), place(me, s));
    for (int i = 1; i < n; i++) {
      outbox.send(context.after(i), place(me, s), bytes, segment.variable);
    }
    context.progress();
    decode(me, s, {place(me, s), bytes});
  }
  std::vector<size_t> decoded(n, 0);
  decoded[me] = count;
  context.wait_until([&] {
    bool all = true;
    for (int r = 0; r < n; r++) {
      for (size_t& s = decoded[r]; s < count && inboxes[r].arrived(s); s++) {
        decode(r, s, inboxes[r].payload(s));
      }
      all &= decoded[r] == count;
    }
    return all;
  });
  context.wait_all();
  return found_inf == 0.0f;
}

}  // namespace pycomm::coded
