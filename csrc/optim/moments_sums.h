// What a step does with the sums of second moments, once for all processors: threads that work on a
// matrix together (`Team`: one thread of the host, or a block of a device) write them, the numbers
// and the factors. Compiled by gcc, nvcc and NVRTC.
//
// A Team has each(count, act): act(i) for i < count; total(count, at): the sum of at(i), in the
// order of moments.h; all(count, at): whether at(i) holds for every i; once(act): what act()
// returns, which one thread calls; and sync(): what was written before is seen behind it.
#pragma once
#include "optim/moments_params.h"

#ifdef __CUDACC__
#define PYCOMM_TEAM __device__ inline
#else
#define PYCOMM_TEAM inline
#endif

namespace pycomm::moments {

/// The larger one, as std::max.
PYCOMM_HD float larger(float x, float y) { return x < y ? y : x; }

/// Writes this rank's mean sums of the steps since the last exchange, to be averaged.
template <typename Team>
PYCOMM_TEAM void write_means(Team& team, const CollectParams& args) {
  const Room room = room_at(args.room, args.rows.all, args.rows.columns);
  const float steps = room.numbers->steps;
  const size_t sums = size_t{args.rows.all} + args.rows.columns;
  const float* const projections = room.fresh + sums + kOwn + 1;
  const float own =
      team.total(kProjections, [&](size_t k) { return projections[k] * projections[k]; });
  team.each(sums + kExtra, [&](size_t i) {
    const bool mean = steps > 0 && i < sums + kOwn;  // projections are of this step alone
    const float value = mean ? (room.since[i] + room.fresh[i]) / (steps + 1) : room.fresh[i];
    args.out[i] = i == sums + kOwn ? own : value;
  });
}

/// Lets the ranks' mean of sums by row or by column enter `to`, and how they are heard.
template <typename Team, typename At>
PYCOMM_TEAM void fold(Team& team, const Folding& folding, size_t count, const At& at, float* to,
                      float* heard, float* heard_squares, double slow, float more) {
  const auto kept = static_cast<float>(slow), rest = static_cast<float>(1 - slow);
  const auto share = static_cast<float>(count);
  const float mean = larger(kTiny, team.total(count, at) / share);
  const float known = team.total(count, [&](size_t i) { return heard[i]; }) / share;
  team.each(count, [&](size_t i) {
    to[i] = to[i] * folding.decay + at(i) * folding.weight;
    hear(heard[i], heard_squares[i], at(i) / mean, known, more, kept, rest);
  });
}

/// Folds the ranks' sums into the second moments; or adds this step's to those that wait.
template <typename Team>
PYCOMM_TEAM void take_sums(Team& team, const CommitParams& args, const Room& room) {
  Numbers& numbers = *room.numbers;
  const size_t rows = args.rows, sums = rows + args.columns, numel = sums + kExtra;
  const auto ranks = static_cast<float>(args.ranks);
  const auto mean = [&](size_t i) { return args.sums[i] / ranks; };
  bool finite = args.sums != nullptr &&
                team.all(numel, [&](size_t i) { return codecs::is_finite(args.sums[i]); });
  float of_mean = 0.0f;
  if (finite) {
    of_mean = team.total(kProjections, [&](size_t k) {
      const float projection = mean(sums + kOwn + 1 + k);
      return projection * projection;
    });
    finite = codecs::is_finite(of_mean);
  }
  // Where no rank has a gradient, second moments neither begin nor decay: zeros scale nothing, and
  // what comes after a long silence would be divided by next to nothing.
  const bool silent = finite && !(team.total(rows, mean) > 0);
  const double decay = numbers.decay * args.beta2;  // a schedule may change it
  const double slow = heard_decay(static_cast<int>(numbers.steps) + 1);
  const float more = numbers.steps;
  team.sync();  // all threads have read the numbers
  if (!finite) {
    if (team.all(numel, [&](size_t i) { return codecs::is_finite(room.fresh[i]); })) {
      team.each(numel, [&](size_t i) { room.since[i] = room.since[i] + room.fresh[i]; });
    }
    team.once([&] {
      numbers.decay = decay;
      numbers.steps = numbers.steps + 1;
      return Folding{};
    });
    return;
  }
  if (silent) {
    team.once([&] {
      numbers.decay = 1.0;
      numbers.steps = 0;
      return Folding{};
    });
    team.each(numel, [&](size_t i) { room.since[i] = 0.0f; });
    return;
  }
  const Folding folding = team.once([&] {
    return fold_numbers(numbers, mean(sums + kLeft), mean(sums + kCoded), mean(sums + kOwn),
                        of_mean, decay, args.ranks);
  });
  fold(team, folding, rows, mean, args.row, args.heard, args.heard + sums, slow, more);
  fold(
      team, folding, sums - rows, [&](size_t j) { return mean(rows + j); }, args.column,
      args.heard + rows, args.heard + sums + rows, slow, more);
  team.each(numel, [&](size_t i) { room.since[i] = 0.0f; });
}

/// Writes factors by row and by column whose products are the roots of second moments, which are
/// row(i) and column(j), times the weight. None is below kFloor times the root mean square of its
/// kind, or the root of its share(i) of that, of row or column i, counted behind the rows.
template <typename Team, typename Row, typename Column, typename Share>
PYCOMM_TEAM void write_factors(Team& team, const CommitParams& shape, const Room& room,
                               float weight, const Row& row, const Column& column,
                               const Share& share) {
  const float of_columns = team.total(shape.columns, column);
  const float all = larger(kTiny, of_columns * weight);
  const float root_row = sqrtf(of_columns / all / static_cast<float>(shape.rows));
  const float root_column = sqrtf(of_columns / static_cast<float>(shape.columns));
  const float least_row = kFloor * root_row, least_column = kFloor * root_column;
  team.each(shape.rows, [&](size_t i) {
    const float least = larger(kTiny, least_row * sqrtf(share(i)));
    room.by_row[i] = larger(least, sqrtf(row(i) / all));
  });
  team.each(shape.columns, [&](size_t j) {
    const float least = larger(kTiny, least_column * sqrtf(share(shape.rows + j)));
    room.by_column[j] = larger(least, sqrtf(column(j)));
  });
}

/// Writes the reciprocals of such factors, after something was added to every second moment: no
/// denominator is below eps, and all of them are products of a row's and a column's factor (Shazeer
/// and Stern 2018, algorithm 4).
template <typename Team, typename Share>
PYCOMM_TEAM void write_reciprocals(Team& team, const CommitParams& args, const Room& room,
                                   float weight, const Share& share) {
  const double eps = args.eps > 1e-12 ? args.eps : 1e-12;
  const auto least = static_cast<float>(weight * (eps * eps));
  const auto rows = static_cast<float>(args.rows);
  const auto columns = static_cast<float>(args.columns);
  const float by_column = least * rows, by_row = least * columns;
  const auto column = [&](size_t j) { return args.column[j] + by_column; };
  const float of_columns = team.total(args.columns, column);
  const float all = of_columns * weight;
  const float least_row = kFloor * kFloor * (of_columns / rows);
  const float least_column = kFloor * kFloor * (of_columns / columns);
  team.each(args.rows, [&](size_t i) {
    const float lowest = least_row * share(i);
    room.reciprocal_row[i] = sqrtf(all / larger(lowest, args.row[i] + by_row));
  });
  team.each(args.columns, [&](size_t j) {
    const float lowest = least_column * share(args.rows + j);
    room.reciprocal_column[j] = 1 / sqrtf(larger(lowest, column(j)));
  });
}

/// Makes the ranks' sums of one step the scale of its coding. What is not finite overflows anyway.
template <typename Team>
PYCOMM_TEAM void write_scale(Team& team, const CommitParams& args, const Room& room) {
  const auto ranks = static_cast<float>(args.ranks);
  const size_t rows = args.rows;
  const auto by_row = static_cast<float>(args.columns), by_column = static_cast<float>(rows);
  const bool finite =
      team.all(rows + args.columns, [&](size_t i) { return codecs::is_finite(args.sums[i]); });
  write_factors(
      team, args, room, 1.0f, [&](size_t i) { return finite ? args.sums[i] / ranks : by_row; },
      [&](size_t j) { return finite ? args.sums[rows + j] / ranks : by_column; },
      [](size_t) { return 1.0f; });
}

/// Takes the ranks' sums of a matrix.
template <typename Team>
PYCOMM_TEAM void take_commit(Team& team, const CommitParams& args) {
  const Room room = room_at(args.room, args.rows, args.columns);
  if (args.use == kScale) return write_scale(team, args, room);
  if (args.use == kStep) take_sums(team, args, room);
  team.sync();
  const float weight = room.numbers->weight;
  if (!(weight > 0)) return;
  const size_t sums = size_t{args.rows} + args.columns;
  const auto share = [&](size_t i) { return floor_share(args.heard[i], args.heard[sums + i]); };
  write_factors(
      team, args, room, weight, [&](size_t i) { return args.row[i]; },
      [&](size_t j) { return args.column[j]; }, share);
  write_reciprocals(team, args, room, weight, share);
}

}  // namespace pycomm::moments

#undef PYCOMM_TEAM
