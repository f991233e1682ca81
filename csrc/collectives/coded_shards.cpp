// Half of an all-reduce each: reduce_scatter is its first shot, all_gather its second. Each rank
// has one row of the same pieces.
#include "collectives/coded.h"
#include "collectives/coded_agree.h"
#include "collectives/coded_coder.h"
#include "collectives/coded_landing.h"
#include "collectives/coded_stream.h"
#include "collectives/dispatch.h"

namespace pycomm::coded {
namespace {

size_t row_numel(const CodedArgs& args) {
  return args.pieces.size == 0 ? 0 : args.pieces.end()[-1].offset + args.pieces.end()[-1].numel;
}

Layout row_layout(const Exchange& ex, const CodedArgs& args) {
  return {args.pieces, values_of(args.pieces), 1, coded_segment(ex.segment_bytes())};
}

/// What one owner knows, all must know.
bool all_agree(Exchange& ex, bool finite) {
  uint8_t flag = finite;
  dispatch::all_reduce(ex, Algo::direct, &flag, 1, {DType::uint8, ReduceOp::min});
  return flag != 0;
}

}  // namespace

bool reduce_scatter(Exchange& ex, const CodedArgs& args, void* out) {
  const int n = ex.size(), me = ex.rank();
  const size_t row = row_numel(args);
  const std::vector<Run> values = values_of(args.pieces);
  Agreed agreed(args, values, row, static_cast<size_t>(n));
  agreed.agree(ex);
  ex.note_algo("one_shot");
  const Layout layout = row_layout(ex, args);
  const Coder coder(args, &agreed, me, n, ex.feedback_scratch(), {}, Packing::close, &ex.spent());
  const size_t each = layout.bytes(), count = layout.count(0);

  // What we send to each owner, then what each rank sends to us.
  uint8_t* const sent = ex.scratch(2 * n * each);
  const auto place = [&](int r, size_t s) { return sent + r * each + layout.at(0, s).payload; };
  const auto arrival = [&](int r, size_t s) { return place(r == me ? r : n + r, s); };
  std::deque<Inbox> inboxes;
  for (int r = 0; r < n; r++) {
    inboxes.emplace_back(ex, r);
    for (size_t s = 0; r != me && s < count; s++) {
      inboxes[r].expect(arrival(r, s), layout.at(0, s).bytes, layout.at(0, s).variable);
    }
  }
  Outbox outbox(ex);
  std::vector<size_t> own(count);
  for (size_t s = 0; s < count; s++) {
    const Segment& segment = layout.at(0, s);
    const Span<const Run> runs = layout.runs(segment);
    for (int i = 1; i <= n; i++) {
      const int owner = ex.after(i);
      const Landing from(args, args.data.at(owner * row), n, ex.feedback_scratch(), nullptr);
      const size_t bytes = coder.encode(Hop::worker, runs, from.read(runs), place(owner, s), owner);
      if (owner == me) {
        own[s] = bytes;
      } else {
        outbox.send(owner, place(owner, s), bytes, segment.variable);
        ex.progress();
      }
    }
  }
  float found_inf = 0.0f;
  const Landing to(args, out, n, ex.feedback_scratch(), &found_inf);
  for (size_t s = 0; s < count; s++) {
    const Span<const Run> runs = layout.runs(layout.at(0, s));
    const Floats sum = to.room(runs);
    for (int r = 0; r < n; r++) {
      if (r != me) ex.wait_until([&] { return inboxes[r].arrived(s); });
      coder.decode(runs,
                   r == me ? Span<const uint8_t>(place(me, s), own[s]) : inboxes[r].payload(s), sum,
                   r > 0, ex.member(r));
    }
    to.finish(runs, sum, all);
  }
  ex.wait_all();
  return all_agree(ex, found_inf == 0.0f);
}

bool all_gather(Exchange& ex, const CodedArgs& args, void* out) {
  ex.note_algo("one_shot");
  const int n = ex.size(), me = ex.rank();
  const size_t row = row_numel(args);
  const Layout layout = row_layout(ex, args);
  const Coder coder(args, nullptr, me, n, ex.feedback_scratch(), {}, Packing::close, &ex.spent());
  const size_t each = layout.bytes(), count = layout.count(0);
  uint8_t* const payloads = ex.scratch(n * each);
  const auto place = [&](int r, size_t s) { return payloads + r * each + layout.at(0, s).payload; };
  std::deque<Inbox> inboxes;
  for (int r = 0; r < n; r++) {
    inboxes.emplace_back(ex, r);
    for (size_t s = 0; r != me && s < count; s++) {
      inboxes[r].expect(place(r, s), layout.at(0, s).bytes, layout.at(0, s).variable);
    }
  }

  float found_inf = 0.0f;
  const Landing from(args, args.data.data, n, ex.feedback_scratch(), nullptr);
  std::vector<Landing> to;
  for (int r = 0; r < n; r++) {
    const Values rows{out, row * n, args.data.dtype};
    to.emplace_back(args, rows.at(r * row), n, ex.feedback_scratch(), &found_inf);
  }
  const auto decode = [&](int r, size_t s, Span<const uint8_t> payload) {
    const Span<const Run> runs = layout.runs(layout.at(0, s));
    const Floats values = to[r].room(runs);
    coder.decode(runs, payload, values, false, ex.member(r));
    to[r].finish(runs, values, none);
  };
  Outbox outbox(ex);
  for (size_t s = 0; s < count; s++) {
    const Segment& segment = layout.at(0, s);
    const Span<const Run> runs = layout.runs(segment);
    const size_t bytes = coder.encode(Hop::worker, runs, from.read(runs), place(me, s));
    for (int i = 1; i < n; i++) {
      outbox.send(ex.after(i), place(me, s), bytes, segment.variable);
    }
    ex.progress();
    decode(me, s, {place(me, s), bytes});
  }
  std::vector<size_t> decoded(n, 0);
  decoded[me] = count;
  ex.wait_until([&] {
    bool all = true;
    for (int r = 0; r < n; r++) {
      for (size_t& s = decoded[r]; s < count && inboxes[r].arrived(s); s++) {
        decode(r, s, inboxes[r].payload(s));
      }
      all &= decoded[r] == count;
    }
    return all;
  });
  ex.wait_all();
  return found_inf == 0.0f;
}

}  // namespace pycomm::coded
