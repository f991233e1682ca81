#include "optim/moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "optim/spread.h"

namespace pycomm::moments {
namespace {

using feedback::Storage;

constexpr size_t kSlice = 1024;           // values of a row that stay in the first-level cache
constexpr size_t kFar = size_t{1} << 21;  // values of a call from which caches do not hold a pass
static_assert(kSlice % kPatch == 0 && kBlock % feedback::kBlock == 0);

// ------------------------------------------------------------------------------ sums of rows

// A vector of the compiler's, which each level of SIMD holds in as many registers as it needs.
using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));

/// The lanes of a patch, or values for them. Four members and no array, which stay in registers.
struct Lanes {
  Eight a = {}, b = {}, c = {}, d = {};

  PYCOMM_HD static Lanes at(const float* x) {
    const auto* from = reinterpret_cast<const Eight*>(x);
    return {from[0], from[1], from[2], from[3]};
  }
  PYCOMM_HD void to(float* x) const {
    auto* out = reinterpret_cast<Eight*>(x);
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
  }
  PYCOMM_HD Lanes operator+(const Lanes& y) const { return {a + y.a, b + y.b, c + y.c, d + y.d}; }
  PYCOMM_HD Lanes operator*(const Lanes& y) const { return {a * y.a, b * y.b, c * y.c, d * y.d}; }

  /// Adds half of the lanes to the other, until one is left.
  PYCOMM_HD float total() const {
    const Eight eight = (a + c) + (b + d);
    float lane[8];
    *reinterpret_cast<Eight*>(lane) = eight;
    for (size_t i = 0; i < 4; i++) lane[i] += lane[i + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
  }
};
static_assert(kLanes == 32);

/// The last columns of a row, fewer than there are lanes, with zeros behind them.
struct Tail {
  float at[kLanes] = {};
  PYCOMM_HD Tail(const float* from, size_t count) { std::memcpy(at, from, 4 * count); }
};

/// Returns the end of the patch that begins at p.
PYCOMM_HD size_t end_of(size_t p, size_t columns) {
  return columns - p < kPatch ? columns : p + kPatch;
}

PYCOMM_HD void add_lanes(float* to, const Lanes& more) { (Lanes::at(to) + more).to(to); }

/// Squares a row: the sum is returned, and the squares are added to `column`, which has room for a
/// multiple of kLanes.
PYCOMM_SIMD float square_row(const float* __restrict x, size_t columns, float* __restrict column) {
  float sum = 0;
  for (size_t j = 0; j < columns;) {
    Lanes lanes;
    const size_t end = end_of(j, columns);
    for (; j + kLanes <= end; j += kLanes) {
      const Lanes values = Lanes::at(x + j), squares = values * values;
      lanes = lanes + squares;
      add_lanes(column + j, squares);
    }
    if (j < end) {
      const Lanes values = Lanes::at(Tail(x + j, end - j).at), squares = values * values;
      lanes = lanes + squares;
      add_lanes(column + j, squares);
      j = end;
    }
    sum += lanes.total();
  }
  return sum;
}

/// The same of two rows, whose squares are added to each other first.
PYCOMM_SIMD void square_rows(const float* __restrict x, size_t columns, float* __restrict row,
                             float* __restrict column) {
  row[0] = row[1] = 0;
  const float* const y = x + columns;
  for (size_t j = 0; j < columns;) {
    Lanes of_x, of_y;
    const size_t end = end_of(j, columns);
    for (; j + kLanes <= end; j += kLanes) {
      const Lanes u = Lanes::at(x + j), v = Lanes::at(y + j), u2 = u * u, v2 = v * v;
      of_x = of_x + u2;
      of_y = of_y + v2;
      add_lanes(column + j, u2 + v2);
    }
    if (j < end) {
      const Lanes u = Lanes::at(Tail(x + j, end - j).at), v = Lanes::at(Tail(y + j, end - j).at);
      const Lanes u2 = u * u, v2 = v * v;
      of_x = of_x + u2;
      of_y = of_y + v2;
      add_lanes(column + j, u2 + v2);
      j = end;
    }
    row[0] += of_x.total();
    row[1] += of_y.total();
  }
}

PYCOMM_SIMD float total(const float* x, size_t count) {
  float sum = 0;
  for (size_t j = 0; j < count;) {
    Lanes lanes;
    const size_t end = end_of(j, count);
    for (; j + kLanes <= end; j += kLanes) lanes = lanes + Lanes::at(x + j);
    if (j < end) lanes = lanes + Lanes::at(Tail(x + j, end - j).at);
    j = end;
    sum += lanes.total();
  }
  return sum;
}

/// Returns the sum of the products.
PYCOMM_SIMD float project(const float* x, const float* signs, size_t count) {
  float sum = 0;
  for (size_t j = 0; j < count;) {
    Lanes lanes;
    const size_t end = end_of(j, count);
    for (; j + kLanes <= end; j += kLanes) lanes = lanes + Lanes::at(x + j) * Lanes::at(signs + j);
    if (j < end) {
      lanes = lanes + Lanes::at(Tail(x + j, end - j).at) * Lanes::at(Tail(signs + j, end - j).at);
    }
    j = end;
    sum += lanes.total();
  }
  return sum;
}

/// Adds to `sums` those of the squares of e and of x + e, of whole patches of a row or its last.
PYCOMM_SIMD void add_errors(const float* x, const float* e, size_t count, float* sums) {
  for (size_t j = 0; j < count;) {
    Lanes left, coded;
    const size_t end = end_of(j, count);
    for (; j + kLanes <= end; j += kLanes) {
      const Lanes error = Lanes::at(e + j), both = Lanes::at(x + j) + error;
      left = left + error * error;
      coded = coded + both * both;
    }
    if (j < end) {
      const Lanes error = Lanes::at(Tail(e + j, end - j).at);
      const Lanes both = Lanes::at(Tail(x + j, end - j).at) + error;
      left = left + error * error;
      coded = coded + both * both;
    }
    j = end;
    sums[0] += left.total();
    sums[1] += coded.total();
  }
}

PYCOMM_SIMD void add_to(float* to, const float* x, size_t count) {
  for (size_t j = 0; j < count; j++) to[j] += x[j];
}

PYCOMM_SIMD void add_times(float* to, const float* x, float by, size_t count) {
  for (size_t j = 0; j < count; j++) to[j] = to[j] + x[j] * by;
}

// ------------------------------------------------------------------------------ values of a row

PYCOMM_SIMD void scale_to(const float* from, float* to, size_t count, float by) {
  for (size_t j = 0; j < count; j++) to[j] = from[j] * by;
}

PYCOMM_SIMD void divide_row(float* __restrict g, const float* __restrict m,
                            const float* __restrict column, size_t count, float beta, float rest,
                            float row) {
  for (size_t j = 0; j < count; j++) g[j] = (g[j] * rest + m[j] * beta) * row * column[j];
}

PYCOMM_SIMD void divide_alone(float* __restrict g, const float* __restrict column, size_t count,
                              float rest, float row) {
  for (size_t j = 0; j < count; j++) g[j] = g[j] * rest * row * column[j];
}

PYCOMM_SIMD void decay_row(const float* g, const float* x, float* out, size_t count, float decay) {
  for (size_t j = 0; j < count; j++) out[j] = g[j] + x[j] * decay;
}

/// The sum of g and of m, if that is not null, times what belongs to each.
PYCOMM_SIMD void blend_row(const float* g, const float* m, float* out, size_t count, float beta,
                           float rest) {
  if (!m) return scale_to(g, out, count, rest);
  for (size_t j = 0; j < count; j++) out[j] = g[j] * rest + m[j] * beta;
}

/// Leaves a share of the gradient in a row that was divided.
PYCOMM_SIMD void bound_row(float* __restrict p, const float* __restrict m,
                           const float* __restrict column, size_t count, float share, float other,
                           float row) {
  for (size_t j = 0; j < count; j++) p[j] = p[j] * share + m[j] * other * row * column[j];
}

PYCOMM_SIMD void multiply_row(float* __restrict x, const float* __restrict column, size_t count,
                              float row) {
  for (size_t j = 0; j < count; j++) x[j] = x[j] * row * column[j];
}

PYCOMM_SIMD void move_row(float* __restrict x, const float* __restrict g,
                          const float* __restrict column, size_t count, float row, float lr,
                          float keep, float limit) {
  if (limit == 0) {
    for (size_t j = 0; j < count; j++) x[j] = x[j] * keep - g[j] * row * column[j] * lr;
    return;
  }
  for (size_t j = 0; j < count; j++) {
    float moved = g[j] * row * column[j];
    moved = moved > limit ? limit : moved;  // a NaN stays one
    moved = moved < -limit ? -limit : moved;
    x[j] = x[j] * keep - moved * lr;
  }
}

/// The same without denominators.
PYCOMM_SIMD void move_plainly(float* __restrict x, const float* __restrict g, size_t count,
                              float lr, float keep) {
  for (size_t j = 0; j < count; j++) x[j] = x[j] * keep - g[j] * lr;
}

PYCOMM_SIMD void sent_plainly(const float* x, const float* before, const float* after, float* out,
                              size_t count) {
  for (size_t j = 0; j < count; j++) out[j] = x[j] + before[j] - after[j];
}

PYCOMM_SIMD void sent_row(const float* __restrict x, const float* __restrict before,
                          const float* __restrict after, const float* __restrict column,
                          float* __restrict out, size_t count, float row) {
  for (size_t j = 0; j < count; j++) out[j] = (x[j] + before[j] - after[j]) * row * column[j];
}

// ------------------------------------------------------------------------------ matrices

size_t blocks_of(size_t rows) { return (rows + kBlock - 1) / kBlock; }

const float* floats_at(const Stored& stored) { return reinterpret_cast<const float*>(stored.at); }

/// Returns `count` stored values from value i on, in `room` (kSlice + 32) if they are not floats.
const float* loaded(const Stored& stored, size_t i, size_t count, float* room) {
  if (stored.storage == Storage::float32) return floats_at(stored) + i;
  const size_t before = stored.storage == Storage::int8 ? i % feedback::kBlock : 0;
  const size_t bytes = stored.storage == Storage::int8
                           ? feedback::stored_bytes(stored.storage, i - before)
                           : i * sizeof(uint16_t);
  feedback::load(stored.storage, stored.at + bytes, {room, before + count});
  return room + before;
}

using Room = float[kSlice + feedback::kBlock];

/// Copies values of the first-level cache. `far`: to memory that nobody reads soon, past the
/// caches, which would read it first.
void put(float* to, const float* from, size_t count, bool far) {
#ifdef __SSE2__
  size_t i = 0;
  for (; far && i < count && reinterpret_cast<uintptr_t>(to + i) % 16 != 0; i++) to[i] = from[i];
  for (; far && i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  to += i;
  from += i;
  count -= i;
#else
  (void)far;
#endif
  std::memcpy(to, from, count * sizeof(float));
}

/// Calls act(at, count) for slices of a block of rows.
template <typename Act>
void over_slices(const Matrix& x, size_t block, const Act& act) {
  const size_t end = std::min(x.rows, (block + 1) * kBlock) * x.columns;
  for (size_t at = block * kBlock * x.columns; at < end; at += kSlice) {
    act(at, std::min(kSlice, end - at));
  }
}

/// Calls act(k, n, i, j) for the n values of a slice from its value k on, which are in row i from
/// column j on.
template <typename Act>
void over_rows(const Matrix& x, size_t at, size_t count, const Act& act) {
  for (size_t k = 0, n; k < count; k += n) {
    const size_t i = (at + k) / x.columns, j = (at + k) % x.columns;
    n = std::min(count - k, x.columns - j);
    act(k, n, i, j);
  }
}

const Matrix& matrix_of(const Matrix& item) { return item; }
template <typename Item>
const Matrix& matrix_of(const Item& item) {
  return item.x;
}

/// Calls act(item, block, far) for each block of rows of each matrix; `far`: see put().
template <typename Items, typename Act>
void over_blocks(Items& items, int threads, const Act& act) {
  std::vector<std::pair<decltype(items.data()), size_t>> places;
  size_t values = 0;
  for (auto& item : items) {
    const Matrix& x = matrix_of(item);
    for (size_t b = 0; b < blocks_of(x.rows); b++) places.emplace_back(&item, b);
    values += x.rows * x.columns;
  }
  const bool far = values >= kFar;
  spread(places.size(), values, threads, [&](size_t n) {
    act(*places[n].first, places[n].second, far);
#ifdef __SSE2__
    if (far) _mm_sfence();
#endif
  });
}

/// The work on one matrix of `encode`.
class Encoding {
 public:
  /// `room` is zeros, room_for(args) of them.
  Encoding(const Encode& args, float* room)
      : x{args.values, args.rows, args.columns, args.row, args.column},
        args_(args),
        width_(width_of(args)),
        rows_(room),
        errors_(rows_ + args.real),
        reciprocals_(errors_ + 2 * args.rows),
        columns_(reciprocals_ + width_) {
    for (size_t j = 0; j < args.columns; j++) {
      reciprocals_[j] = args.row ? 1.0f / args.column[j] : 1.0f;
    }
  }

  static size_t room_for(const Encode& args) {
    return args.real + 2 * args.rows + width_of(args) * (1 + blocks_of(args.real));
  }

  /// Goes over a block of rows.
  void take(size_t block, bool far) {
    const size_t first = block * kBlock, end = std::min(args_.rows, first + kBlock);
    if (args_.gradient.at) {
      const size_t known = args_.momentum.at ? std::clamp(args_.known, first, end) : first;
      const size_t together = args_.errors ? 1 : kBlock;  // errors are added up row by row
      for (size_t i = first, stop; i < end; i = stop) {
        stop = std::min(i < known ? known : end, i + together);
        blend(i, stop, i < known, far);
      }
      return;
    }
    for (size_t i = first; i < end; i += 2) {
      const size_t stop = std::min(end, i + 2);
      look(i, stop);
      for (size_t r = i; args_.row && r < stop; r++) divide(r, far);
    }
  }

  /// Adds up what the blocks have found. Returns whether the gradient is to be scaled down.
  bool finish() {
    if (!args_.row_sums) return false;
    add_times(args_.row_sums, rows_, args_.unit, args_.real);
    for (size_t b = 1; b < blocks_of(args_.real); b++) {
      add_to(columns_, columns_ + b * width_, args_.columns);
    }
    if (args_.real) add_times(args_.column_sums, columns_, args_.unit, args_.columns);
    if (args_.most == 0 || !args_.row) return false;
    const float energy = total(rows_, args_.real) * args_.unit;
    const float most = std::max(kTiny, total(args_.bounds, args_.real) * args_.most);
    if (!(energy > most)) return false;
    share_ = std::sqrt(most / energy);
    return true;
  }

  /// Scales the gradient down in a block of rows.
  void bound(size_t block) {
    const float other = (1 - share_) * args_.beta;
    for_slices(block, [&](size_t i, size_t j, size_t count, float* p, Room& room) {
      if (args_.momentum.at && i < args_.known) {
        const float* m = loaded(args_.momentum, i * args_.columns + j, count, room);
        bound_row(p, m, reciprocals_ + j, count, share_, other, 1.0f / args_.row[i]);
      } else {
        scale_to(p, p, count, share_);
      }
    });
  }

  void add_errors_up() {
    if (!args_.errors) return;
    for (size_t k = 0; k < 2; k++) args_.errors[k] += total(errors_ + k * args_.rows, args_.rows);
  }

  const Matrix x;

 private:
  /// Adds squares and projections of up to two rows.
  void look(size_t begin, size_t end) {
    const float* x = args_.values + begin * args_.columns;
    const size_t count = std::min(end, args_.real) - std::min(begin, args_.real);
    if (args_.row_sums && count > 0) {
      float* const columns = &columns_[begin / kBlock * width_];
      if (count == 2) {
        square_rows(x, args_.columns, &rows_[begin], columns);
      } else {
        rows_[begin] = square_row(x, args_.columns, columns);
      }
    }
    if (!args_.signs) return;
    for (size_t i = begin; i < begin + count; i++, x += args_.columns) {
      if (i < args_.first || (i - args_.first) % args_.stride != 0) continue;
      float& to = args_.projections[(i - args_.first) / args_.stride];
      to = to + project(x, args_.signs, args_.columns) * args_.by;
    }
  }

  /// Makes rows of a gradient that is elsewhere, which have no factors.
  void blend(size_t begin, size_t end, bool known, bool far) {
    Room made, room;
    const size_t first = begin * args_.columns, last = end * args_.columns;
    for (size_t at = first; at < last; at += kSlice) {
      const size_t count = std::min(kSlice, last - at);
      const float* g = floats_at(args_.gradient) + at;
      if (args_.parameter.at) {
        decay_row(g, floats_at(args_.parameter) + at, made, count, args_.decay);
        g = made;
      }
      const float* const m = known ? loaded(args_.momentum, at, count, room) : nullptr;
      blend_row(g, m, made, count, args_.beta, args_.rest);
      put(args_.values + at, made, count, far);
      written(begin, at, count, made, room, at == first, far);
    }
  }

  void divide(size_t i, bool far) {
    const float row = 1.0f / args_.row[i];
    Room room;
    for (size_t j = 0; j < args_.columns; j += kSlice) {
      const size_t count = std::min(kSlice, args_.columns - j), at = i * args_.columns + j;
      float* const g = args_.values + at;
      if (args_.momentum.at && i < args_.known) {
        const float* m = loaded(args_.momentum, at, count, room);
        divide_row(g, m, reciprocals_ + j, count, args_.beta, args_.rest, row);
      } else {
        divide_alone(g, reciprocals_ + j, count, args_.rest, row);
      }
      written(i, at, count, g, room, j == 0, far);
    }
  }

  template <typename Act>
  void for_slices(size_t block, const Act& act) {
    const size_t end = std::min(args_.rows, (block + 1) * kBlock);
    Room room;
    for (size_t i = block * kBlock; i < end; i++) {
      for (size_t j = 0; j < args_.columns; j += kSlice) {
        const size_t count = std::min(kSlice, args_.columns - j), at = i * args_.columns + j;
        act(i, j, count, args_.values + at, room);
        written(i, at, count, args_.values + at, room, j == 0, false);
      }
    }
  }

  /// Takes note of values that are to be coded.
  void written(size_t i, size_t at, size_t count, const float* p, Room& room, bool first,
               bool far) {
    if (args_.copy) put(args_.copy + at, p, count, far);
    if (!args_.errors) return;
    float sums[2] = {first ? 0 : errors_[i], first ? 0 : errors_[args_.rows + i]};
    add_errors(p, loaded(args_.residual, at, count, room), count, sums);
    errors_[i] = sums[0];
    errors_[args_.rows + i] = sums[1];
  }

  /// Room for the sums of a block's columns.
  static size_t width_of(const Encode& args) {
    return (args.columns + kLanes - 1) / kLanes * kLanes;
  }

  const Encode& args_;
  const size_t width_;
  float* const rows_;         // sums of squares [real]
  float* const errors_;       // two sums [2, rows]
  float* const reciprocals_;  // of the columns' factors
  float* const columns_;      // sums of squares [blocks, width]
  float share_ = 1;
};

void sent_block(const Sent& by, size_t block, bool far) {
  const Matrix& x = by.x;
  over_slices(x, block, [&](size_t at, size_t count) {
    const float *values = x.values + at, *e = nullptr, *left = nullptr;
    Room before, after, out;
    if (by.before.at) {
      e = loaded(by.before, at, count, before);
      left = loaded(by.after, at, count, after);
    }
    if (!x.row && e) {
      sent_plainly(values, e, left, out, count);
      values = out;
    } else if (x.row) {
      over_rows(x, at, count, [&](size_t k, size_t n, size_t i, size_t j) {
        if (e) {
          sent_row(values + k, e + k, left + k, x.column + j, out + k, n, x.row[i]);
        } else {
          std::memcpy(out + k, values + k, 4 * n);
          multiply_row(out + k, x.column + j, n, x.row[i]);
        }
      });
      values = out;
    }
    uint8_t* const to = by.out + feedback::stored_bytes(by.storage, at);
    if (by.storage == Storage::float32) {
      put(reinterpret_cast<float*>(to), values, count, far);
    } else {
      feedback::store(by.storage, {values, count}, to);
    }
  });
}

void move_block(const Move& by, size_t block, bool far) {
  const Matrix& x = by.x;
  const float* const all = by.gradient;
  const bool any = x.row && by.probe.value[0] != 0;
  const float restore =
      any ? restoring(by.probe, all[by.probe.at[0]], all[by.probe.at[1]], kTolerance) : 1.0f;
  over_slices(x, block, [&](size_t at, size_t count) {
    const float* g = all + at;
    float* const values = x.values + at;
    Room restored;
    if (restore != 1) {
      scale_to(g, restored, count, restore);
      g = restored;
    }
    if (!x.row) {
      move_plainly(values, g, count, by.lr, by.keep);
    } else {
      over_rows(x, at, count, [&](size_t k, size_t n, size_t i, size_t j) {
        move_row(values + k, g + k, x.column + j, n, x.row[i], by.lr, by.keep, by.limit);
      });
    }
    if (by.momentum) put(by.momentum + at, g, count, far);
  });
}

/// Returns the share that row or column i has of the floor's square.
float floor_of(const Heard& heard, size_t i) {
  return heard.mean == nullptr ? 1.0f : floor_share(heard.mean[i], heard.square[i]);
}

}  // namespace

void encode(const std::vector<Encode>& matrices, int threads) {
  std::vector<Encoding> all;
  all.reserve(matrices.size());
  // Kept from call to call: pages of fresh memory would cost as much as the sums.
  thread_local std::vector<float> room;
  size_t values = 0, numel = 0;
  for (const Encode& one : matrices) numel += Encoding::room_for(one);
  room.assign(numel, 0.0f);
  float* next = room.data();
  for (const Encode& one : matrices) {
    all.emplace_back(one, next);
    next += Encoding::room_for(one);
    values += one.rows * one.columns;
  }
  over_blocks(all, threads, [](Encoding& one, size_t block, bool far) { one.take(block, far); });
  std::vector<char> bounded(all.size());
  spread(all.size(), values, threads, [&](size_t i) {
    bounded[i] = all[i].finish();
    for (size_t b = 0; bounded[i] && b < blocks_of(all[i].x.rows); b++) all[i].bound(b);
    all[i].add_errors_up();
  });
}

std::vector<Probe> land(const std::vector<Matrix>& matrices, float unit, int threads) {
  over_blocks(matrices, threads, [&](const Matrix& x, size_t block, bool) {
    if (!x.row) return;
    for (size_t i = block * kBlock; i < std::min(x.rows, (block + 1) * kBlock); i++) {
      multiply_row(x.values + i * x.columns, x.column, x.columns, x.row[i] * unit);
    }
  });
  std::vector<Probe> probes(matrices.size());
  for (size_t n = 0; n < matrices.size(); n++) {
    const Matrix& x = matrices[n];
    const size_t count = std::min(kProbed, x.rows * x.columns);
    for (size_t i = 0; i < count; i++) look_at(probes[n], static_cast<uint32_t>(i), x.values[i]);
    for (float& value : probes[n].value) value /= unit;
  }
  return probes;
}

void sent(const std::vector<Sent>& matrices, int threads) {
  over_blocks(matrices, threads, sent_block);
}

void move(const std::vector<Move>& matrices, int threads) {
  over_blocks(matrices, threads, move_block);
}

void fold(const Sums& sums, const float* fresh, float decay, float weight, int steps) {
  const double slow = heard_decay(steps);
  const auto kept = static_cast<float>(slow), rest = static_cast<float>(1 - slow);
  const auto more = static_cast<float>(steps - 1);
  const auto add = [&](float* to, const float* from, size_t count, const Heard& heard) {
    for (size_t i = 0; i < count; i++) to[i] = to[i] * decay + from[i] * weight;
    if (heard.mean == nullptr) return;
    const float mean = std::max(kTiny, total(from, count) / static_cast<float>(count));
    const float known = total(heard.mean, count) / static_cast<float>(count);
    for (size_t i = 0; i < count; i++) {
      hear(heard.mean[i], heard.square[i], from[i] / mean, known, more, kept, rest);
    }
  };
  add(sums.row, fresh, sums.rows, sums.by_row);
  add(sums.column, fresh + sums.rows, sums.columns, sums.by_column);
}

void factors(const Sums& sums, float* row, float* column) {
  const float of_columns = total(sums.column, sums.columns);
  const float all = std::max(kTiny, of_columns * sums.weight);
  const float root_row = std::sqrt(of_columns / all / static_cast<float>(sums.rows));
  const float root_column = std::sqrt(of_columns / static_cast<float>(sums.columns));
  const float least_row = kFloor * root_row, least_column = kFloor * root_column;
  for (size_t i = 0; i < sums.rows; i++) {
    const float least = std::max(kTiny, least_row * std::sqrt(floor_of(sums.by_row, i)));
    row[i] = std::max(least, std::sqrt(sums.row[i] / all));
  }
  for (size_t j = 0; j < sums.columns; j++) {
    const float least = std::max(kTiny, least_column * std::sqrt(floor_of(sums.by_column, j)));
    column[j] = std::max(least, std::sqrt(sums.column[j]));
  }
}

void reciprocal_factors(const Sums& sums, size_t all_rows, float least, float* row, float* column) {
  const auto rows = static_cast<float>(all_rows), columns = static_cast<float>(sums.columns);
  const float by_column = least * rows, by_row = least * columns;
  for (size_t j = 0; j < sums.columns; j++) column[j] = sums.column[j] + by_column;
  const float of_columns = total(column, sums.columns);
  const float all = of_columns * sums.weight;
  const float least_row = kFloor * kFloor * (of_columns / rows);
  const float least_column = kFloor * kFloor * (of_columns / columns);
  for (size_t i = 0; i < sums.rows; i++) {
    const float lowest = least_row * floor_of(sums.by_row, i);
    row[i] = std::sqrt(all / std::max(lowest, sums.row[i] + by_row));
  }
  for (size_t j = 0; j < sums.columns; j++) {
    const float lowest = least_column * floor_of(sums.by_column, j);
    column[j] = 1 / std::sqrt(std::max(lowest, column[j]));
  }
}

}  // namespace pycomm::moments
