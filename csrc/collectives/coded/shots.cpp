#include "collectives/coded/shots.h"

#include "collectives/coded/coded.h"
#include "collectives/coded/float32_view.h"
#include "core/error.h"

namespace pycomm::coded {
namespace {

/// Values that are processed at once, so that their sum stays in the cache.
constexpr size_t kTogether = 1 << 14;

/// Calls do_part(runs) for one group of runs after the other; a run is never cut.
template <typename F>
void in_parts(Span<const PieceRun> runs, const F& do_part) {
  for (size_t begin = 0, end = 0; begin < runs.size; begin = end) {
    size_t numel = 0;
    do {
      numel += runs[end++].numel;
    } while (end < runs.size && numel + runs[end].numel <= kTogether);
    do_part(runs.sub(begin, end - begin));
  }
}

}  // namespace

void check_runs(Span<const Piece> pieces, Span<const PieceRun> runs) {
  for (const PieceRun& run : runs) {
    if (run.piece >= pieces.size) {
      throw Error("a run is of piece " + std::to_string(run.piece) + ", and there are " +
                  std::to_string(pieces.size));
    }
    const Piece& piece = pieces[run.piece];
    const size_t granule = piece.codec->granule();
    const bool inside = run.offset <= piece.numel && run.numel <= piece.numel - run.offset;
    const bool whole = run.offset == 0 && run.numel == piece.numel;
    const bool last = inside && run.offset + run.numel == piece.numel;
    const bool on_grain = run.offset % kGrain == 0 && (last || run.numel % kGrain == 0);
    const bool on_granule =
        granule && run.offset % granule == 0 && (last || run.numel % granule == 0);
    if (!inside || (!whole && !(on_grain && on_granule))) {
      throw Error("a run of " + std::to_string(run.numel) + " values from " +
                  std::to_string(run.offset) + " on cannot be cut from piece " +
                  std::to_string(run.piece) + ", which has " + std::to_string(piece.numel) +
                  " values and the codec " + piece.codec->spec());
    }
  }
}

Shots::Shots(const CodedArgs& args, size_t rows, int rank, int ranks)
    : args_(args),
      row_numel_(args.data.size / rows),
      ranks_(ranks),
      coder_(args, rank, ranks, scratch_) {
  check("coded bucket", args, rows);
}

size_t Shots::contribute(Span<const PieceRun> runs, size_t row, uint8_t* out) {
  const Float32View from(args_, this->row(row), ranks_, scratch_, nullptr);
  size_t bytes = 0;
  in_parts(runs, [&](Span<const PieceRun> part) {
    bytes += coder_.encode(Hop::worker, part, from.read(part), out + bytes, row);
  });
  return bytes;
}

size_t Shots::own(Span<const PieceRun> runs, const std::vector<Span<const uint8_t>>& payloads,
                  uint8_t* out) {
  const Float32View to(args_, row(0), ranks_, scratch_, nullptr);
  std::vector<Span<const uint8_t>> left = payloads;
  size_t bytes = 0;
  in_parts(runs, [&](Span<const PieceRun> part) {
    const Floats sum = to.room(part);
    for (size_t r = 0; r < left.size(); r++) {
      const size_t used = coder_.decode(part, left[r], sum, r > 0, static_cast<int>(r));
      left[r] = left[r].sub(used, left[r].size - used);
    }
    to.average(part, sum);
    bytes += coder_.encode(Hop::owner, part, sum, out + bytes);
  });
  return bytes;
}

void Shots::add_up(Span<const PieceRun> runs, const std::vector<Span<const uint8_t>>& payloads) {
  const Float32View to(args_, row(0), ranks_, scratch_, &found_inf_);
  std::vector<Span<const uint8_t>> left = payloads;
  in_parts(runs, [&](Span<const PieceRun> part) {
    const Floats sum = to.room(part);
    for (size_t r = 0; r < left.size(); r++) {
      const size_t used = coder_.decode(part, left[r], sum, r > 0, static_cast<int>(r));
      left[r] = left[r].sub(used, left[r].size - used);
    }
    to.finish_sum(part, sum);
  });
}

void Shots::land(Span<const PieceRun> runs, size_t row, Span<const uint8_t> payload, int sender) {
  const Float32View to(args_, this->row(row), ranks_, scratch_, &found_inf_);
  in_parts(runs, [&](Span<const PieceRun> part) {
    const Floats values = to.room(part);
    const size_t used = coder_.decode(part, payload, values, false, sender);
    payload = payload.sub(used, payload.size - used);
    to.finish_result(part, values);
  });
}

}  // namespace pycomm::coded
