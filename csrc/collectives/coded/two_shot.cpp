#include "collectives/coded/two_shot.h"

#include <algorithm>
#include <numeric>

namespace pycomm::coded {

Plan all_reduce_plan(Span<const Piece> pieces, const PieceRuns& values, int ranks, bool one_shot,
                     size_t owned_segment, size_t shown_segment, const Shares& shares) {
  PieceRuns owned, shown;
  for (const PieceRun& run : values) {
    const bool gathered = pieces[run.piece].codec->combine() == Combine::gather;
    (one_shot || gathered ? shown : owned).push_back(run);
  }
  Plan plan{{pieces, owned, ranks, owned_segment, shares}, {pieces, shown, 1, shown_segment}};
  plan.one_shot = one_shot;
  return plan;
}

Plan reduce_scatter_plan(Span<const Piece> pieces, int ranks, size_t segment) {
  std::vector<size_t> numbers(static_cast<size_t>(ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  Plan plan{BucketLayout::of_rows(pieces, numbers, segment), {}};
  plan.gathers = false;
  return plan;
}

size_t Plan::count(int owner) const {
  size_t most = owned.count(owner);
  for (const BucketLayout& place : places) most = std::max(most, place.count(owner));
  return most;
}

size_t Plan::most() const {
  size_t most = std::max(owned.most(), shown.most());
  for (const BucketLayout& place : places) most = std::max(most, place.most());
  return most;
}

TwoShot::TwoShot(Exchange& exchange, Coder& coder, const Plan& plan)
    : exchange_(exchange),
      coder_(coder),
      plan_(plan),
      n_(exchange.size()),
      me_(exchange.rank()),
      landed_(static_cast<size_t>(n_), 0) {}

void TwoShot::run() {
  const size_t segments = plan_.most();
  for (; first_ < segments; first_ = last_) {
    last_ = first_ + std::min(exchange_.stage(), segments - first_);
    if (plan_.scatters) contribute();
    coder_.start();
    exchange_.flush(Shot::contribution);
    show();
    for (size_t s = first_; s < in_stage(plan_.count(me_)); s++) own(s);
    coder_.start();
    exchange_.flush(Shot::result);
    exchange_.wait([this] { return land(); });
    coder_.start();
  }
}

// Encodes segment by segment for all owners in turn: one is encoded while those before it are sent.
void TwoShot::contribute() {
  for (size_t s = first_; s < last_; s++) {
    for (int i = 1; i <= n_; i++) {
      const int owner = exchange_.after(i);
      if (s < plan_.count(owner)) exchange_.make(owner, s);
      if (s >= plan_.owned.count(owner)) continue;
      const Segment& segment = plan_.owned.at(owner, s);
      uint8_t* const room = exchange_.room(Shot::contribution, owner, s);
      const size_t bytes =
          coder_.contribute(plan_.owned.runs(segment), segment.row, segment.number, room);
      exchange_.put(Shot::contribution, owner, s, bytes);
    }
  }
}

void TwoShot::show() {
  for (; shown_ < in_stage(plan_.shown.count(0)); shown_++) {
    const Span<const PieceRun> runs = plan_.shown.runs(plan_.shown.at(0, shown_));
    uint8_t* const room = exchange_.room(Shot::shown, me_, shown_);
    exchange_.put(Shot::shown, me_, shown_, coder_.contribute(runs, 0, 0, room));
  }
}

// A float32 sum accumulates in the data themselves: our contribution there is encoded by now.
void TwoShot::own(size_t s) {
  if (s >= plan_.owned.count(me_)) return void(land_from(me_));
  const Segment& segment = plan_.owned.at(me_, s);
  const Span<const PieceRun> runs = plan_.owned.runs(segment);
  if (plan_.scatters) {
    exchange_.wait([this, s] {
      land();
      return have_all(Shot::contribution, s);
    });
    collect(Shot::contribution, s);
    if (!plan_.gathers) return coder_.add_up(runs, received_);
  }
  uint8_t* const room = exchange_.room(Shot::result, me_, s);
  const size_t bytes =
      plan_.scatters ? coder_.own(runs, received_, room) : coder_.contribute(runs, 0, 0, room);
  exchange_.put(Shot::result, me_, s, bytes);
  land_from(me_);
}

// Goes on while results are decoded: it may be another rank's turn then.
bool TwoShot::land() {
  const bool shown = land_shown();
  bool all = true;
  for (size_t before = results_ + 1; plan_.gathers && before != results_;) {
    before = results_;
    all = true;
    for (int i = 1; i <= n_; i++) all &= land_from(exchange_.after(i));
  }
  return shown && all;
}

bool TwoShot::land_from(int owner) {
  const size_t count = in_stage(plan_.count(owner));
  size_t& s = landed_[static_cast<size_t>(owner)];
  for (; s < count && exchange_.has(Shot::result, owner, s); s++, results_++) {
    const auto land = [&](const BucketLayout& layout, const Received& payload) {
      if (s >= layout.count(owner)) return;
      const Segment& segment = layout.at(owner, s);
      coder_.land(layout.runs(segment), segment.row, payload);
    };
    if (plan_.places.empty()) {
      land(plan_.owned, {exchange_.get(Shot::result, owner, s), exchange_.member(owner)});
      continue;
    }
    const Span<const Received> payloads = exchange_.get_places(owner, s);
    for (size_t p = 0; p < payloads.size; p++) land(plan_.places[p], payloads[p]);
  }
  return s == count;
}

// Decodes in rank order. Our own values there are encoded.
bool TwoShot::land_shown() {
  for (; added_up_ < shown_; added_up_++) {
    if (!have_all(Shot::shown, added_up_)) return false;
    const Span<const PieceRun> runs = plan_.shown.runs(plan_.shown.at(0, added_up_));
    collect(Shot::shown, added_up_);
    if (plan_.one_shot) {
      uint8_t* const room = exchange_.room(Shot::result, me_, 0);
      const size_t bytes = coder_.own(runs, received_, room);
      coder_.land(runs, 0, {{room, bytes}, exchange_.member(me_)});
    } else {
      coder_.add_up(runs, received_);
    }
  }
  return added_up_ == in_stage(plan_.shown.count(0));
}

bool TwoShot::have_all(Shot shot, size_t s) {
  for (int i = 1; i < n_; i++) {
    if (!exchange_.has(shot, exchange_.after(i), s)) return false;
  }
  return true;
}

void TwoShot::collect(Shot shot, size_t s) {
  received_.clear();
  for (int r = 0; r < n_; r++) {
    received_.push_back({exchange_.get(shot, r, s), exchange_.member(r)});
  }
}

}  // namespace pycomm::coded
