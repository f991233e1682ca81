// The passes of moments.h, once for all processors. Compiled by gcc, nvcc and NVRTC.
//
// A Warp takes a patch of columns in some rows, or kPatch neighbouring values; a lane every
// kLanes-th value, as in the order of sums. It is a warp of a device, or vectors of the host:
//   Lanes                   a float of each lane
//   has(k, left)            whether it takes the k-th value of each lane, of so many values
//   load(array, i, left, k) the k-th values of the lanes from value i on, and zeros where there are
//                           not so many; also of one of the forms: load(from, form, i, left, k)
//   store(...)              the inverse; put(): of what nobody reads soon
//   sum(lanes)              half of the lanes is added to the other, until one is left
//   clamped(lanes, limit)   those from -limit to limit; a NaN stays one
//   leads()                 true for one lane
//   place(rows, i)          the place of a lane's value, or of the first lane's, which is the i-th;
//                           by_row(place, rows, factors), by_column(): factors of the lanes there
//   kAhead                  values of each lane that are loaded before they are worked on
//   kInMemory               sums of columns are added up where they are in the end
//   kNeighbours             values that a warp takes at once where rows do not matter
//
// A Team is what works on a matrix when all warps have: one thread of the host, or a block of a
// device. It has each(count, act): act(i) for i < count; total(count, at): the sum of at(i), in the
// order of moments.h; all(count, at): whether at(i) holds for every i; once(act): what act()
// returns, which one thread calls; leads(): true for that thread; fresh(from): what warps have
// written; prepare(from, rows, columns) and then down(from, rows, columns): the sum of a column of
// that; and sync(): what was written before is seen behind it.
#pragma once
#include "optim/moments_params.h"

#ifdef __CUDACC__
#define PYCOMM_PASS __device__ __forceinline__
#define PYCOMM_TEAM __device__ inline
#define PYCOMM_UNROLL _Pragma("unroll")
#else
#define PYCOMM_PASS inline __attribute__((always_inline))
#define PYCOMM_TEAM inline
#define PYCOMM_UNROLL
#endif

namespace pycomm::moments {

constexpr int kApart = kLanes;          ///< of a lane's values
constexpr int kEach = kPatch / kLanes;  ///< and their number

/// Values of a dtype, which are coded as `Value` says.
template <typename Value>
struct Array {
  typename Value::Code* at;

  PYCOMM_HD explicit Array(const void* values)
      : at(static_cast<typename Value::Code*>(const_cast<void*>(values))) {}
  PYCOMM_HD float value(size_t i) const { return Value::decode(at[i]); }
  PYCOMM_HD static constexpr bool is_float32() { return sizeof(*at) == 4; }
};

/// The larger one, as std::max.
PYCOMM_HD float larger(float x, float y) { return x < y ? y : x; }

/// Returns the room of a matrix. It always has one: asking keeps its addresses, which come late in
/// most kernels, out of registers that are scarce before.
template <typename Params>
PYCOMM_HD Room room_of(const Params& args) {
  return args.room == nullptr ? Room{} : room_at(args.room, args.rows.all, args.rows.columns);
}

/// Returns how many of `size` values there are from `begin` on, up to those of a patch, or `most`.
PYCOMM_HD int left_of(size_t size, size_t begin, size_t most = kPatch) {
  const size_t left = begin < size ? size - begin : 0;
  return left < most ? static_cast<int>(left) : static_cast<int>(most);
}

/// Returns the factor of a row of a shard; that of padding changes nothing.
PYCOMM_HD float factor_of(const float* by_row, const Rows& rows, size_t i) {
  return i < rows.real() ? by_row[rows.first + i] : 1.0f;
}

/// Parts of the sums of a shard, in scratch memory.
struct Parts {
  float* row;         ///< [rows, patches]; then [rows]
  float* row_sum;     ///< [rows]
  float* column;      ///< [blocks, columns]
  float* projection;  ///< [kProjections, patches]; of all shards in the first one's

  /// `at`: the scratch memory of all shards.
  PYCOMM_HD Parts(float* at, const Rows& rows) {
    row = at + rows.shard * rows.scratch_floats();
    row_sum = row + rows.cells();
    column = row_sum + rows.count;
    projection = at + rows.cells() + rows.count + rows.blocks() * rows.columns;
  }
};

/// Returns the number of blocks of so many rows.
PYCOMM_HD size_t blocks_of(size_t rows) { return (rows + kBlock - 1) / kBlock; }

/// Returns the sum of a row's parts.
template <typename Team>
PYCOMM_TEAM float sum_of_patches(const Team& team, const float* parts, size_t row, size_t patches) {
  float sum = 0.0f;
  for (size_t p = 0; p < patches; p++) sum = sum + team.fresh(parts + row * patches + p);
  return sum;
}

// ---------------------------------------------------------------- squares

/// Adds up squares and projections in a patch of some rows of a block, `first` to `end`. Sums of
/// columns in memory go on from those of the rows before.
template <typename Warp, typename Array>
PYCOMM_PASS void square_tile(const Warp& warp, const CodingParams& args, const Array& values,
                             size_t first, size_t end, uint32_t patch) {
  using Lanes = typename Warp::Lanes;
  const Rows& rows = args.rows;
  const Parts parts(args.scratch, rows);
  const auto patches = static_cast<uint32_t>(rows.patches());
  const size_t begin = size_t{patch} * kPatch;
  const int left = left_of(rows.columns, begin);
  const size_t sums = first / kBlock * rows.columns + begin;
  Lanes column[kEach] = {};
  for (size_t i = first; i < end; i += 2) {
    const size_t at = i * rows.columns + begin;
    const bool two = i + 1 < end;
    Lanes x[Warp::kAhead], y[Warp::kAhead], of_x{}, of_y{};
    PYCOMM_UNROLL
    for (int from = 0; warp.has(from, left); from += Warp::kAhead) {
      PYCOMM_UNROLL
      for (int a = 0; a < Warp::kAhead; a++) {
        x[a] = warp.load(values, at, left, from + a);
        y[a] = two ? warp.load(values, at + rows.columns, left, from + a) : Lanes{};
      }
      PYCOMM_UNROLL
      for (int a = 0; a < Warp::kAhead; a++) {
        const Lanes of_one = x[a] * x[a], of_other = y[a] * y[a];
        of_x = of_x + of_one;
        of_y = of_y + of_other;
        const Lanes both = of_one + of_other;
        if (!Warp::kInMemory) {
          column[from + a] = column[from + a] + both;
        } else if (i % kBlock == 0) {
          warp.store(parts.column, sums, left, from + a, both);
        } else {
          const Lanes before = warp.load(parts.column, sums, left, from + a);
          warp.store(parts.column, sums, left, from + a, before + both);
        }
      }
    }
    const float sum_of_x = warp.sum(of_x), sum_of_y = warp.sum(of_y);
    if (warp.leads()) {
      parts.row[i * patches + patch] = sum_of_x;
      if (two) parts.row[(i + 1) * patches + patch] = sum_of_y;
    }
    for (uint32_t r = 0; args.signs != nullptr && r < 2; r++) {
      const size_t row = rows.first + i + r, behind = row - args.first;
      if (i + r >= end || row < args.first || behind % args.stride != 0) continue;
      Lanes products{};
      PYCOMM_UNROLL
      for (int k = 0; warp.has(k, left); k++) {
        const int a = k % Warp::kAhead;
        const Lanes z = Warp::kAhead < kEach ? warp.load(values, at + r * rows.columns, left, k)
                        : r == 0             ? x[a]
                                             : y[a];
        products = products + z * warp.load(args.signs, begin, left, k);
      }
      const float sum = warp.sum(products);
      if (warp.leads()) parts.projection[behind / args.stride * patches + patch] = sum;
    }
  }
  PYCOMM_UNROLL
  for (int k = 0; !Warp::kInMemory && warp.has(k, left); k++) {
    warp.store(parts.column, sums, left, k, column[k]);
  }
}

/// Adds up what the warps have found, and decides by how much the gradients of shards count.
template <typename Team>
PYCOMM_TEAM void finish_squares(const Team& team, const CodingParams& args) {
  const Room room = room_of(args);
  const Rows first = args.rows.of_shard(0);
  const size_t patches = first.patches();
  const size_t begin = first.first, end = begin + size_t{first.shards} * first.count;
  float* const columns = room.fresh + first.all;
  float* const extra = columns + first.columns;
  const float unit_squared = args.unit_squared;
  team.each(first.all, [&](size_t i) {
    if (i < begin || i >= end) room.fresh[i] = 0.0f;  // of shards that are not coded here
  });
  for (uint32_t s = 0; s < first.shards; s++) {
    const Rows shard = first.of_shard(s);
    const Parts parts(args.scratch, shard);
    team.each(shard.real(), [&](size_t i) {
      const float sum = sum_of_patches(team, parts.row, i, patches);
      parts.row_sum[i] = sum;
      room.fresh[shard.first + i] = sum * unit_squared;
    });
    team.prepare(parts.column, blocks_of(shard.real()), shard.columns);
  }
  team.each(first.columns, [&](size_t j) {
    float all = 0.0f;
    for (uint32_t s = 0; s < first.shards; s++) {
      const Rows shard = first.of_shard(s);
      const size_t blocks = blocks_of(shard.real());
      if (blocks == 0) break;
      const float* const column = Parts(args.scratch, shard).column + j;
      all = all + team.down(column, blocks, first.columns) * unit_squared;
    }
    columns[j] = all;
  });
  const auto unit = static_cast<float>(args.unit);
  team.each(kProjections, [&](size_t k) {
    const size_t row = args.first + k * args.stride;
    const bool there = args.signs != nullptr && row >= begin && row < end && row < first.all;
    const float* const projection = Parts(args.scratch, first).projection;
    extra[kOwn + 1 + k] = there ? sum_of_patches(team, projection, k, patches) * unit : 0.0f;
  });
  team.each(kOwn + 1, [&](size_t k) { extra[k] = 0.0f; });
  team.sync();
  Numbers& numbers = *room.numbers;
  for (uint32_t s = 0; s < first.shards; s++) {
    const Rows shard = first.of_shard(s);
    const float* const sums = Parts(args.scratch, shard).row_sum;
    const float* const bounds = args.bounds + shard.first;
    const float energy = team.total(shard.real(), [&](size_t i) { return sums[i]; }) * unit_squared;
    const float allowed = team.total(shard.real(), [&](size_t i) { return bounds[i]; });
    if (!team.leads()) continue;
    const float most = larger(kTiny, allowed * most_of(numbers, args.bound, args.ranks));
    const bool is_above = numbers.weight > 0 && energy > most;
    room.shares[s] = is_above ? sqrtf(most / energy) : 1.0f;
  }
  if (team.leads()) set_step(numbers, args.beta1, args.unit);
}

// ---------------------------------------------------------------- encode

/// Replaces gradients by what is coded, in a patch of row i, and writes that to `copy`, too, if it
/// has memory. `share`: how much of the gradient counts. `kMade`: all of it was encoded before.
/// `factors`: of the patch, if the warp has loaded them.
template <bool kMade, typename Warp, typename Array>
PYCOMM_PASS void encode_patch(const Warp& warp, const CodingParams& args, const Array& values,
                              const Array& copy, size_t i, uint32_t patch, float share,
                              const typename Warp::Lanes* factors) {
  using Lanes = typename Warp::Lanes;
  const Rows& rows = args.rows;
  const Room room = room_of(args);
  const size_t patches = rows.patches(), begin = size_t{patch} * kPatch;
  const size_t at = i * rows.columns + begin;
  const int left = left_of(rows.columns, begin);
  const float beta = room.numbers->beta * args.by_kept, rest = room.numbers->rest;
  const float other = (1 - share) * beta;
  const float by_row = args.divides != 0 ? factor_of(room.inverse_row, rows, i) : 1.0f;
  const bool adds = beta > 0 && i < rows.real();
  // On a device, what is not wanted costs less than to decide about it.
  constexpr bool all = Warp::kAhead == kEach;
  Lanes g[Warp::kAhead], m[Warp::kAhead], e[Warp::kAhead], of_left{}, of_coded{};
  PYCOMM_UNROLL
  for (int from = 0; warp.has(from, left); from += Warp::kAhead) {
    PYCOMM_UNROLL
    for (int a = 0; a < Warp::kAhead; a++) {
      g[a] = warp.load(values, at, left, from + a);
      m[a] = warp.load(args.momentum, args.momentum_form, at, adds ? left : 0, from + a);
      e[a] = warp.load(args.stored, args.form, at, args.stored != nullptr ? left : 0, from + a);
    }
    PYCOMM_UNROLL
    for (int a = 0; a < Warp::kAhead; a++) {
      Lanes by_column = all ? factors[from + a] : Lanes(1.0f);
      if (!all && args.divides != 0) {
        by_column = warp.load(room.inverse_column, begin, left, from + a);
      }
      Lanes p = kMade ? g[a] : adds ? g[a] * rest + m[a] * beta : g[a] * rest;
      if (!kMade && (all || args.divides != 0)) p = p * by_row * by_column;
      if (share < 1.0f) p = p * share;
      if (share < 1.0f && adds) p = p + m[a] * other * by_row * by_column;
      if (all || args.stored != nullptr) {
        const Lanes both = p + e[a];
        of_left = of_left + e[a] * e[a];
        of_coded = of_coded + both * both;
      }
      warp.store(values, at, left, from + a, p);
      if (copy.at != nullptr) warp.put(copy, at, left, from + a, p);
    }
  }
  if (args.stored == nullptr) return;
  const float left_sum = warp.sum(of_left), coded_sum = warp.sum(of_coded);
  if (!warp.leads()) return;
  args.left[i * patches + patch] = left_sum;
  args.left[rows.cells() + i * patches + patch] = coded_sum;
}

/// Adds up what the warps have found of the errors of all shards.
template <typename Team>
PYCOMM_TEAM void finish_encode(const Team& team, const CodingParams& args) {
  if (args.stored == nullptr) return;
  const Rows& rows = args.rows;
  const size_t patches = rows.patches();
  float* const errors = room_of(args).fresh + rows.all + rows.columns;
  const float* parts = args.left - rows.shard * rows.scratch_floats();
  for (uint32_t s = 0; s < rows.shards; s++, parts += rows.scratch_floats()) {
    const float* const coded = parts + rows.cells();
    const float of_left =
        team.total(rows.count, [&](size_t i) { return sum_of_patches(team, parts, i, patches); });
    const float of_coded =
        team.total(rows.count, [&](size_t i) { return sum_of_patches(team, coded, i, patches); });
    if (!team.leads()) continue;
    errors[kLeft] += of_left;
    errors[kCoded] += of_coded;
  }
}

// ---------------------------------------------------------------- neighbours

/// A place in a matrix.
struct Place {
  uint32_t row, column;

  PYCOMM_HD void next(const Rows& rows) {
    for (column += kLanes; column >= rows.columns; row++) column -= rows.columns;
  }
};

/// Stores what was sent of coded values.
template <typename Warp, typename Array>
PYCOMM_PASS void send_patch(const Warp& warp, const SentParams& args, const Array& values,
                            size_t patch) {
  using Lanes = typename Warp::Lanes;
  const Room room = room_of(args);
  const uint8_t* const before = args.swapped != 0 ? args.after : args.before;
  const uint8_t* const after = args.swapped != 0 ? args.before : args.after;
  const size_t begin = patch * Warp::kNeighbours;
  const int left = left_of(args.rows.numel(), begin, Warp::kNeighbours);
  Place place = warp.place(args.rows, begin);
  PYCOMM_UNROLL
  for (int k = 0; warp.has(k, left); k++, place.next(args.rows)) {
    Lanes x{};
    if (warp.takes(left, k)) {
      x = warp.load(values, begin, left, k);
      if (before != nullptr) {
        x = x + warp.load(before, args.form, begin, left, k);
        x = x - warp.load(after, args.form, begin, left, k);
      }
      if (args.divides != 0) {
        x = x * (warp.by_row(place, args.rows, room.by_row) * args.kept) *
            warp.by_column(place, args.rows, room.by_column);
      } else {
        x = x * args.kept;
      }
    }
    warp.store(args.out, args.out_form, begin, left, k, x);
  }
}

/// Makes coded values momenta.
template <typename Warp, typename Array>
PYCOMM_PASS void land_patch(const Warp& warp, const LandParams& args, const Array& values,
                            size_t patch) {
  if (args.divides == 0 && args.unit == 1.0f) return;
  const Room room = room_of(args);
  const size_t begin = patch * Warp::kNeighbours;
  const int left = left_of(args.rows.numel(), begin, Warp::kNeighbours);
  Place place = warp.place(args.rows, begin);
  PYCOMM_UNROLL
  for (int k = 0; warp.has(k, left); k++, place.next(args.rows)) {
    auto x = warp.load(values, begin, left, k);
    if (args.divides != 0) {
      x = x * (warp.by_row(place, args.rows, room.by_row) * args.unit) *
          warp.by_column(place, args.rows, room.by_column);
    } else {
      x = x * args.unit;
    }
    warp.store(values, begin, left, k, x);
  }
}

/// Takes note of landed values in one of the first patches.
template <typename Warp, typename Array>
PYCOMM_PASS void look_at_patch(const Warp& warp, const LandParams& args, const Array& values,
                               size_t patch, Probe& probe) {
  const size_t begin = patch * kPatch;
  const int left = left_of(args.rows.values(), begin);
  PYCOMM_UNROLL
  for (int k = 0; warp.has(k, left); k++) {
    warp.look(probe, begin, left, k, warp.load(values, begin, left, k));
  }
}

/// Takes a step.
template <typename Warp, typename Array>
PYCOMM_PASS void move_patch(const Warp& warp, const MoveParams& args, const Array& values,
                            const Array& gradient, const Array& momentum, size_t patch) {
  using Lanes = typename Warp::Lanes;
  const Room room = room_of(args);
  const bool divides = args.divides != 0;
  const bool known = !divides || room.numbers->weight > 0;
  const bool limited = divides && room.numbers->steps > 0;
  float by = args.kept;
  if (known && args.probed != 0) {
    const Probe probe = room.numbers->probe;
    const float first = gradient.value(probe.at[0]), second = gradient.value(probe.at[1]);
    by = by * restoring(probe, first, second, gradient.is_float32() ? kTolerance : kTolerance16);
  }
  const size_t begin = patch * Warp::kNeighbours;
  const int left = left_of(args.rows.numel(), begin, Warp::kNeighbours);
  Place place = warp.place(args.rows, begin);
  PYCOMM_UNROLL
  for (int k = 0; warp.has(k, left); k++, place.next(args.rows)) {
    Lanes moved = warp.load(gradient, begin, left, k);
    const Lanes kept = moved * by;
    warp.put(momentum, begin, left, k, kept);
    if (!known) continue;
    if (divides) {
      moved = kept * warp.by_row(place, args.rows, room.reciprocal_row) *
              warp.by_column(place, args.rows, room.reciprocal_column);
    }
    if (limited) moved = warp.clamped(moved, args.limit);
    const Lanes x = warp.load(values, begin, left, k);
    warp.store(values, begin, left, k, x * args.keep - moved * args.lr);
  }
}

/// Takes a step of AdamW.
PYCOMM_HD void step_value(float& x, float g, float& momentum, float& squares, const Factors& by) {
  const float m = momentum + by.rest1 * (g - momentum);
  const float v = squares * by.beta2 + by.rest2 * g * g;
  momentum = m;
  squares = v;
  x = x * by.keep - by.lr * m / (sqrtf(v) / by.root + by.eps);
}

// ---------------------------------------------------------------- a step's sums

/// Writes this rank's mean sums of the steps since the last exchange, to be averaged.
template <typename Team>
PYCOMM_TEAM void write_means(const Team& team, const CollectParams& args) {
  const Room room = room_of(args);
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
PYCOMM_TEAM void fold(const Team& team, const Folding& folding, size_t count, const At& at,
                      float* to, float* heard, float* heard_squares, double slow, float more) {
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
PYCOMM_TEAM void take_sums(const Team& team, const CommitParams& args, const Room& room) {
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
    if (!team.leads()) return;
    numbers.decay = decay;
    numbers.steps = numbers.steps + 1;
    return;
  }
  if (silent) {
    team.each(numel, [&](size_t i) { room.since[i] = 0.0f; });
    if (!team.leads()) return;
    numbers.decay = 1.0;
    numbers.steps = 0;
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
PYCOMM_TEAM void write_factors(const Team& team, const CommitParams& shape, const Room& room,
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
    room.inverse_row[i] = 1.0f / room.by_row[i];
  });
  team.each(shape.columns, [&](size_t j) {
    const float least = larger(kTiny, least_column * sqrtf(share(shape.rows + j)));
    room.by_column[j] = larger(least, sqrtf(column(j)));
    room.inverse_column[j] = 1.0f / room.by_column[j];
  });
}

/// Writes the reciprocals of such factors, after something was added to every second moment: no
/// denominator is below eps, and all of them are products of a row's and a column's factor (Shazeer
/// and Stern 2018, algorithm 4).
template <typename Team, typename Share>
PYCOMM_TEAM void write_reciprocals(const Team& team, const CommitParams& args, const Room& room,
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
PYCOMM_TEAM void write_scale(const Team& team, const CommitParams& args, const Room& room) {
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
PYCOMM_TEAM void take_commit(const Team& team, const CommitParams& args) {
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

#undef PYCOMM_PASS
#undef PYCOMM_TEAM
#undef PYCOMM_UNROLL
