#include "optim/moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "codecs/base/feedback.h"
#include "codecs/cast.h"
#include "optim/moments_sums.h"
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

PYCOMM_HD void add_lanes(float* to, const Lanes& more) { (Lanes::at(to) + more).to(to); }

#define PYCOMM_INLINED __attribute__((always_inline))

/// Calls act(j, at) for each kLanes columns of each patch, where at(x) loads values of a row x from
/// column j on, with zeros behind the last; and end() behind each patch.
template <typename Act, typename End>
PYCOMM_HD void over_lanes(size_t columns, const Act& act, const End& end) {
  for (size_t j = 0; j < columns;) {
    const size_t stop = columns - j < kPatch ? columns : j + kPatch;
    for (; j + kLanes <= stop; j += kLanes) {
      act(j, [j](const float* x) PYCOMM_INLINED { return Lanes::at(x + j); });
    }
    if (j < stop) {
      act(j,
          [j, stop](const float* x) PYCOMM_INLINED { return Lanes::at(Tail(x + j, stop - j).at); });
      j = stop;
    }
    end();
  }
}

/// Squares a row x, and another one if y is not null: sums are written to `row`, and the squares,
/// which are added to each other first, are added to `column`, which has room for a multiple of
/// kLanes.
PYCOMM_SIMD void square_rows(const float* __restrict x, const float* __restrict y, size_t columns,
                             float* __restrict row, float* __restrict column) {
  float sum_x = 0, sum_y = 0;
  Lanes of_x, of_y;
  over_lanes(
      columns,
      [&](size_t j, const auto& at) PYCOMM_INLINED {
        const Lanes u = at(x), v = y ? at(y) : Lanes{}, u2 = u * u, v2 = v * v;
        of_x = of_x + u2;
        of_y = of_y + v2;
        add_lanes(column + j, u2 + v2);
      },
      [&]() PYCOMM_INLINED {
        sum_x += of_x.total();
        sum_y += of_y.total();
        of_x = of_y = {};
      });
  row[0] = sum_x;
  if (y) row[1] = sum_y;
}

PYCOMM_SIMD float total(const float* x, size_t count) {
  float sum = 0;
  Lanes lanes;
  over_lanes(
      count, [&](size_t, const auto& at) PYCOMM_INLINED { lanes = lanes + at(x); },
      [&]() PYCOMM_INLINED {
        sum += lanes.total();
        lanes = {};
      });
  return sum;
}

/// Returns the sum of the products.
PYCOMM_SIMD float project(const float* x, const float* signs, size_t count) {
  float sum = 0;
  Lanes lanes;
  over_lanes(
      count, [&](size_t, const auto& at) PYCOMM_INLINED { lanes = lanes + at(x) * at(signs); },
      [&]() PYCOMM_INLINED {
        sum += lanes.total();
        lanes = {};
      });
  return sum;
}

/// Adds to `sums` those of the squares of e and of x + e, of whole patches of a row or its last.
PYCOMM_SIMD void add_errors(const float* x, const float* e, size_t count, float* sums) {
  Lanes left, coded;
  over_lanes(
      count,
      [&](size_t, const auto& at) PYCOMM_INLINED {
        const Lanes error = at(e), both = at(x) + error;
        left = left + error * error;
        coded = coded + both * both;
      },
      [&]() PYCOMM_INLINED {
        sums[0] += left.total();
        sums[1] += coded.total();
        left = coded = {};
      });
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

/// The same where nothing divides.
PYCOMM_SIMD void blend_row(float* __restrict g, const float* __restrict m, size_t count, float beta,
                           float rest) {
  for (size_t j = 0; j < count; j++) g[j] = g[j] * rest + m[j] * beta;
}

PYCOMM_SIMD void divide_alone(float* __restrict g, const float* __restrict column, size_t count,
                              float rest, float row) {
  for (size_t j = 0; j < count; j++) g[j] = g[j] * rest * row * column[j];
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

/// The same without denominators; also writes what is kept of the momentum.
PYCOMM_SIMD void move_plainly(float* __restrict x, const float* __restrict g, float* __restrict out,
                              size_t count, float lr, float keep, float kept) {
  for (size_t j = 0; j < count; j++) {
    out[j] = g[j] * kept;
    x[j] = x[j] * keep - g[j] * lr;
  }
}

/// What was sent of values that nothing divides.
PYCOMM_SIMD void sent_plainly(const float* x, const float* before, const float* after, float* out,
                              size_t count, float kept) {
  for (size_t j = 0; j < count; j++) out[j] = (x[j] + before[j] - after[j]) * kept;
}

PYCOMM_SIMD void sent_row(const float* __restrict x, const float* __restrict before,
                          const float* __restrict after, const float* __restrict column,
                          float* __restrict out, size_t count, float row) {
  for (size_t j = 0; j < count; j++) out[j] = (x[j] + before[j] - after[j]) * row * column[j];
}

// ------------------------------------------------------------------------------ forms

template <typename Form>
PYCOMM_SIMD void load_floats(const uint16_t* in, size_t count, float* out) {
  for (size_t i = 0; i < count; i++) out[i] = Form::decode(in[i]);
}

template <typename Form>
PYCOMM_SIMD void store_floats(const float* in, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; i++) out[i] = Form::encode(in[i]);
}

constexpr auto kFloat32 = static_cast<uint32_t>(Storage::float32);
constexpr auto kInt8 = static_cast<uint32_t>(Storage::int8);

/// Returns values from value i on.
Stored from(const Stored& stored, size_t i) {
  const size_t bytes = stored.form == kInt8 ? feedback::stored_bytes(Storage::int8, i)
                                            : i * (stored.form == kFloat32 ? 4 : 2);
  return {stored.at + bytes, stored.form};
}

float* floats_at(const Stored& stored) { return reinterpret_cast<float*>(stored.at); }

/// Returns `count` values from value i on, in `room` (kSlice + 32) if they are not float32.
const float* loaded(const Stored& stored, size_t i, size_t count, float* room) {
  if (stored.form == kFloat32) return floats_at(stored) + i;
  const size_t before = stored.form == kInt8 ? i % feedback::kBlock : 0;
  const uint8_t* const at = from(stored, i - before).at;
  if (stored.form == kFloat16) {
    load_floats<codecs::cast::Float16>(reinterpret_cast<const uint16_t*>(at), count, room);
  } else {
    feedback::load(static_cast<Storage>(stored.form), at, {room, before + count});
  }
  return room + before;
}

using Slice = float[kSlice + feedback::kBlock];

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
  if (to != from) std::memcpy(to, from, count * sizeof(float));
}

/// Writes floats of one of the forms from value i on.
void put(const Stored& to, size_t i, const float* values, size_t count, bool far) {
  auto* const codes = reinterpret_cast<uint16_t*>(to.at) + i;
  if (to.form == kFloat32) {
    put(floats_at(to) + i, values, count, far);
  } else if (to.form == kFloat16) {
    store_floats<codecs::cast::Float16>(values, count, codes);
  } else {
    store_floats<codecs::cast::BFloat16>(values, count, codes);
  }
}

// ------------------------------------------------------------------------------ matrices

struct Shape {
  size_t rows, columns;
};

/// Factors by row, which are 1 behind the last real one, and by column. Nulls: all are 1.
struct MatrixFactors {
  const float* row = nullptr;
  const float* column = nullptr;
  size_t real = 0;

  float of_row(size_t i) const { return row && i < real ? row[i] : 1.0f; }
};

/// What `encode` does with a shard.
struct Encode {
  float* values = nullptr;  ///< g [rows, columns], which becomes p
  Shape shape = {};
  size_t group = 0;  ///< the same of all shards of a matrix
  size_t real = 0;   ///< rows before the padding
  bool looks_only = false;
  MatrixFactors by = {};
  Stored momentum = {};  ///< m of the real rows; null: it is left out
  float beta = 0, rest = 1;
  float* row_sums = nullptr;  ///< to which `unit` times g's squares are added; null: not wanted
  float* column_sums = nullptr;
  float unit = 1;
  const float* bounds = nullptr;  ///< [real]; g's squares count at most `most` times their sum
  float most = 0;                 ///< 0: any
  const float* signs = nullptr;   ///< [columns]; null: rows have no projections
  size_t begin = 0;               ///< number of the first row in the matrix, of which
  size_t first = 0, stride = 1;   ///< these rows have one
  float* projections = nullptr;   ///< to which `by_unit` times g's rows times the signs are added
  float by_unit = 1;
  Stored residual = {};     ///< e, by which p is coded
  float* errors = nullptr;  ///< [2], to which the squares of e and of p + e are added; null: none
  float* copy = nullptr;    ///< where p is written, too; null: nowhere
};

/// A matrix of `sent`.
struct Sent {
  Stored values;
  Shape shape;
  MatrixFactors by;
  float kept;
  Stored before, after;  ///< the residual before and after the coding, of one form; or none
  Stored out;
};

/// A parameter of `move`.
struct Move {
  Stored x;
  Shape shape;
  Stored gradient;
  Stored momentum;
  MatrixFactors by;  ///< reciprocals of the denominators; nulls: the gradient moves as it is
  float lr, keep, limit;
  float kept;         ///< what the gradient is multiplied by to be kept
  bool moves = true;  ///< else only the momentum is kept
};

size_t blocks_of(size_t rows) { return (rows + kBlock - 1) / kBlock; }

Shape shape_of(const Matrix& m) { return {m.rows.count, m.rows.columns}; }
template <typename Item>
Shape shape_of(const Item& item) {
  return item.shape;
}

Room room_of(const Matrix& m) { return room_at(m.room, m.rows.all, m.rows.columns); }

MatrixFactors factors_of(const Matrix& m) {
  const Room room = room_of(m);
  return {room.by_row + m.rows.first, room.by_column, m.rows.real()};
}

/// Calls act(at, count) for slices of a block of rows.
template <typename Act>
void over_slices(const Shape& x, size_t block, const Act& act) {
  const size_t end = std::min(x.rows, (block + 1) * kBlock) * x.columns;
  for (size_t at = block * kBlock * x.columns; at < end; at += kSlice) {
    act(at, std::min(kSlice, end - at));
  }
}

/// Calls act(k, n, i, j) for the n values of a slice from its value k on, which are in row i from
/// column j on.
template <typename Act>
void over_rows(const Shape& x, size_t at, size_t count, const Act& act) {
  for (size_t k = 0, n; k < count; k += n) {
    const size_t i = (at + k) / x.columns, j = (at + k) % x.columns;
    n = std::min(count - k, x.columns - j);
    act(k, n, i, j);
  }
}

/// Calls act(item, block, far) for each block of rows of each matrix; `far`: see put().
template <typename Items, typename Act>
void over_blocks(Items& items, int threads, const Act& act) {
  std::vector<std::pair<decltype(items.data()), size_t>> places;
  size_t values = 0;
  for (auto& item : items) {
    const Shape x = shape_of(item);
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

// ------------------------------------------------------------------------------ encode

/// The work on one task.
class Encoding {
 public:
  /// `room` is zeros, room_for(task) of them.
  Encoding(const Encode& task, float* room)
      : shape(task.shape),
        task_(task),
        width_(width_of(task)),
        rows_(room),
        errors_(rows_ + task.real),
        reciprocals_(errors_ + 2 * shape.rows),
        columns_(reciprocals_ + width_) {
    for (size_t j = 0; j < shape.columns; j++) {
      reciprocals_[j] = task.by.column ? 1.0f / task.by.column[j] : 1.0f;
    }
  }

  static size_t room_for(const Encode& task) {
    return task.real + 2 * task.shape.rows + width_of(task) * (1 + blocks_of(task.real));
  }

  size_t group() const { return task_.group; }

  /// Goes over a block of rows.
  void take(size_t block, bool far) {
    const size_t first = block * kBlock, end = std::min(shape.rows, first + kBlock);
    for (size_t i = first; i < end; i += 2) {
      const size_t stop = std::min(end, i + 2);
      look(i, stop);
      for (size_t r = i; !task_.looks_only && r < stop; r++) divide(r, far);
    }
  }

  /// Adds up what the blocks have found, and scales a gradient down that is too large.
  void finish() {
    if (add_up()) {
      for (size_t b = 0; b < blocks_of(shape.rows); b++) bound(b);
    }
    for (size_t k = 0; task_.errors && k < 2; k++) {
      task_.errors[k] += total(errors_ + k * shape.rows, shape.rows);
    }
  }

  const Shape shape;

 private:
  /// Returns whether the gradient is to be scaled down.
  bool add_up() {
    if (!task_.row_sums) return false;
    add_times(task_.row_sums, rows_, task_.unit, task_.real);
    for (size_t b = 1; b < blocks_of(task_.real); b++) {
      add_to(columns_, columns_ + b * width_, shape.columns);
    }
    if (task_.real) add_times(task_.column_sums, columns_, task_.unit, shape.columns);
    if (task_.most == 0) return false;
    const float energy = total(rows_, task_.real) * task_.unit;
    const float most = std::max(kTiny, total(task_.bounds, task_.real) * task_.most);
    if (!(energy > most)) return false;
    share_ = std::sqrt(most / energy);
    return true;
  }

  bool has_momentum(size_t i) const { return task_.momentum.at && i < task_.real; }

  /// Scales the gradient down in a block of rows.
  void bound(size_t block) {
    const float other = (1 - share_) * task_.beta;
    const size_t end = std::min(shape.rows, (block + 1) * kBlock);
    Slice room;
    for (size_t i = block * kBlock; i < end; i++) {
      for (size_t j = 0; j < shape.columns; j += kSlice) {
        const size_t count = std::min(kSlice, shape.columns - j), at = i * shape.columns + j;
        float* const p = task_.values + at;
        if (has_momentum(i)) {
          const float* m = loaded(task_.momentum, at, count, room);
          bound_row(p, m, reciprocals_ + j, count, share_, other, 1.0f / task_.by.of_row(i));
        } else {
          scale_to(p, p, count, share_);
        }
        written(i, at, count, p, room, j == 0, false);
      }
    }
  }

  /// Adds squares and projections of up to two rows.
  void look(size_t begin, size_t end) {
    const float* x = task_.values + begin * shape.columns;
    const size_t count = std::min(end, task_.real) - std::min(begin, task_.real);
    if (task_.row_sums && count > 0) {
      const float* const y = count == 2 ? x + shape.columns : nullptr;
      square_rows(x, y, shape.columns, &rows_[begin], &columns_[begin / kBlock * width_]);
    }
    if (!task_.signs) return;
    for (size_t i = task_.begin + begin; i < task_.begin + begin + count; i++) {
      if (i >= task_.first && (i - task_.first) % task_.stride == 0) {
        float& to = task_.projections[(i - task_.first) / task_.stride];
        to = to + project(x, task_.signs, shape.columns) * task_.by_unit;
      }
      x += shape.columns;
    }
  }

  void divide(size_t i, bool far) {
    const float row = 1.0f / task_.by.of_row(i);
    Slice room;
    for (size_t j = 0; j < shape.columns; j += kSlice) {
      const size_t count = std::min(kSlice, shape.columns - j), at = i * shape.columns + j;
      float* const g = task_.values + at;
      if (has_momentum(i)) {
        const float* m = loaded(task_.momentum, at, count, room);
        if (task_.by.row) {
          divide_row(g, m, reciprocals_ + j, count, task_.beta, task_.rest, row);
        } else {
          blend_row(g, m, count, task_.beta, task_.rest);
        }
      } else {
        divide_alone(g, reciprocals_ + j, count, task_.rest, row);
      }
      written(i, at, count, g, room, j == 0, far);
    }
  }

  /// Takes note of values that are to be coded.
  void written(size_t i, size_t at, size_t count, const float* p, Slice& room, bool first,
               bool far) {
    if (task_.copy) put(task_.copy + at, p, count, far);
    if (!task_.errors) return;
    float sums[2] = {first ? 0 : errors_[i], first ? 0 : errors_[shape.rows + i]};
    add_errors(p, loaded(task_.residual, at, count, room), count, sums);
    errors_[i] = sums[0];
    errors_[shape.rows + i] = sums[1];
  }

  /// Room for the sums of a block's columns.
  static size_t width_of(const Encode& task) {
    return (task.shape.columns + kLanes - 1) / kLanes * kLanes;
  }

  const Encode& task_;
  const size_t width_;
  float* const rows_;         // sums of squares [real]
  float* const errors_;       // two sums [2, rows]
  float* const reciprocals_;  // of the columns' factors
  float* const columns_;      // sums of squares [blocks, width]
  float share_ = 1;
};

void run(const std::vector<Encode>& tasks, int threads) {
  std::vector<Encoding> all;
  all.reserve(tasks.size());
  // Kept from call to call: pages of fresh memory would cost as much as the sums.
  thread_local std::vector<float> room;
  size_t values = 0, numel = 0;
  for (const Encode& task : tasks) numel += Encoding::room_for(task);
  room.assign(numel, 0.0f);
  float* next = room.data();
  std::vector<size_t> groups;  // the first one of each, and the end
  for (size_t i = 0; i < tasks.size(); i++) {
    if (i == 0 || tasks[i].group != tasks[i - 1].group) groups.push_back(i);
    all.emplace_back(tasks[i], next);
    next += Encoding::room_for(tasks[i]);
    values += tasks[i].shape.rows * tasks[i].shape.columns;
  }
  groups.push_back(tasks.size());
  over_blocks(all, threads, [](Encoding& one, size_t block, bool far) { one.take(block, far); });
  // Shards add to the same sums, one after the other.
  spread(groups.size() - 1, values, threads, [&](size_t g) {
    for (size_t i = groups[g]; i < groups[g + 1]; i++) all[i].finish();
  });
}

/// Values of a matrix as floats: where they are, or in memory of their own.
class Floats {
 public:
  Floats(const Stored& stored, size_t numel) : stored_(stored) {
    if (stored.form == kFloat32) return;
    own_.resize(numel);
    for (size_t i = 0; i < numel; i += kSlice) {
      loaded(stored, i, std::min(kSlice, numel - i), &own_[i]);
    }
  }

  float* at() { return own_.empty() ? floats_at(stored_) : own_.data(); }

  /// Writes them to where they were, and to `copy`, unless that has them already.
  void write(const Stored& copy) const {
    if (own_.empty()) return;
    put(stored_, 0, own_.data(), own_.size(), false);
    if (copy.at) put(copy, 0, own_.data(), own_.size(), false);
  }

 private:
  const Stored stored_;
  std::vector<float> own_;
};

// ------------------------------------------------------------------------------ what comes of that

void sent_block(const Sent& item, size_t block, bool far) {
  over_slices(item.shape, block, [&](size_t at, size_t count) {
    Slice given, before, after, out;
    const float *values = loaded(item.values, at, count, given), *e = nullptr, *left = nullptr;
    if (item.before.at) {
      e = loaded(item.before, at, count, before);
      left = loaded(item.after, at, count, after);
    }
    if (!item.by.column && e) {
      sent_plainly(values, e, left, out, count, item.kept);
    } else if (!item.by.column) {
      scale_to(values, out, count, item.kept);
    } else {
      over_rows(item.shape, at, count, [&](size_t k, size_t n, size_t i, size_t j) {
        const float row = item.by.of_row(i) * item.kept;
        if (e) {
          sent_row(values + k, e + k, left + k, item.by.column + j, out + k, n, row);
        } else {
          std::memcpy(out + k, values + k, 4 * n);
          multiply_row(out + k, item.by.column + j, n, row);
        }
      });
    }
    if (item.out.form == kFloat32) {
      put(floats_at(item.out) + at, out, count, far);
    } else {
      feedback::store(static_cast<Storage>(item.out.form), {out, count}, from(item.out, at).at);
    }
  });
}

void move_block(const Move& item, size_t block, bool far) {
  over_slices(item.shape, block, [&](size_t at, size_t count) {
    Slice given, scaled, values;
    const float *const g = loaded(item.gradient, at, count, given), *kept = g;
    if (item.kept != 1 && item.by.row) scale_to(g, scaled, count, item.kept);
    if (item.kept != 1 || !item.by.row) kept = scaled;
    if (item.moves) {
      auto* const x = const_cast<float*>(loaded(item.x, at, count, values));
      if (!item.by.row) {
        move_plainly(x, g, scaled, count, item.lr, item.keep, item.kept);
      } else {
        over_rows(item.shape, at, count, [&](size_t k, size_t n, size_t i, size_t j) {
          const float row = item.by.row[i];
          move_row(x + k, kept + k, item.by.column + j, n, row, item.lr, item.keep, item.limit);
        });
      }
      if (item.x.form != kFloat32) put(item.x, at, x, count, false);
    }
    put(item.momentum, at, kept, count, far);
  });
}

// ------------------------------------------------------------------------------ second moments

/// A thread that works alone.
struct Alone {
  template <typename Act>
  void each(size_t count, const Act& act) const {
    for (size_t i = 0; i < count; i++) act(i);
  }
  template <typename At>
  float total(size_t count, const At& at) const {
    float sum = 0;
    for (size_t j = 0; j < count; j += kPatch) {
      float patch[kPatch] = {};
      const size_t end = std::min(kPatch, count - j);
      for (size_t k = 0; k < end; k++) patch[k] = at(j + k);
      sum += moments::total(patch, end);
    }
    return sum;
  }
  template <typename At>
  bool all(size_t count, const At& at) const {
    for (size_t i = 0; i < count; i++) {
      if (!at(i)) return false;
    }
    return true;
  }
  template <typename Act>
  Folding once(const Act& act) const {
    return act();
  }
  void sync() const {}
};

// ------------------------------------------------------------------------------ of moments

/// Adds up the squares of new matrices' gradients; or those of the others, and encodes all.
void take_turns(const std::vector<Matrix>& matrices, const Pass& pass,
                const std::vector<Turn>& turns, int threads, bool new_ones) {
  std::vector<Encode> tasks;
  std::vector<Floats> floats;
  std::vector<Stored> copies;
  floats.reserve(matrices.size());
  const auto place = [&](void* values, const Matrix& m) -> Stored {
    auto* const at = static_cast<uint8_t*>(values);
    return {at ? at + m.offset * size_of(pass.dtype) : nullptr, form_of(pass.dtype)};
  };
  size_t group = 0;
  for (size_t i = 0; i < matrices.size(); i++) {
    const Matrix& m = matrices[i];
    const Turn& turn = turns.at(i);
    if (m.rows.shard == 0) group++;
    if (new_ones && !turn.is_new) continue;
    const Room room = room_of(m);
    Numbers& numbers = *room.numbers;
    float* const extra = room.fresh + m.rows.all + m.rows.columns;
    floats.emplace_back(place(pass.values, m), m.rows.numel());
    copies.push_back(place(pass.copy, m));
    Encode task;
    task.values = floats.back().at();
    task.shape = shape_of(m);
    task.group = group;
    task.real = m.rows.real();
    if (new_ones || !turn.is_new) {
      if (m.rows.shard == 0) std::fill(room.fresh, extra + kExtra, 0.0f);
      task.row_sums = room.fresh + m.rows.first;
      task.column_sums = room.fresh + m.rows.all;
      task.unit = static_cast<float>(pass.unit * pass.unit);
      if (numbers.weight > 0) {
        task.bounds = m.row + m.rows.first;
        task.most = most_of(numbers, pass.bound, pass.ranks);
      }
      task.signs = turn.signs;
      task.begin = m.rows.first;
      task.first = turn.first;
      task.stride = turn.stride;
      task.projections = extra + kOwn + 1;
      task.by_unit = static_cast<float>(pass.unit);
    }
    task.looks_only = new_ones;
    if (!new_ones) {
      set_step(numbers, turn.momentum, pass.unit);
      task.beta = numbers.beta * (1.0f / turn.kept);
      task.rest = numbers.rest;
      if (pass.divides) task.by = factors_of(m);
      if (task.beta > 0) {
        task.momentum = turn.own < 0 ? m.momentum : Stored{m.own.at[turn.own], m.own.form};
      }
      if (turn.signs != nullptr && m.residual.at[0] != nullptr) {
        task.residual = {m.residual.at[turn.residual], m.residual.form};
        task.errors = extra + kLeft;
      }
      if (pass.dtype == DType::float32) task.copy = floats_at(copies.back());
    }
    tasks.push_back(task);
  }
  run(tasks, threads);
  for (size_t i = 0; !new_ones && i < floats.size(); i++) floats[i].write(copies[i]);
}

}  // namespace

void HostMoments::squares(const Pass& pass, const std::vector<Turn>& turns, int threads) const {
  take_turns(matrices_, pass, turns, threads, true);
}

void HostMoments::encode(const Pass& pass, const std::vector<Turn>& turns, int threads) const {
  take_turns(matrices_, pass, turns, threads, false);
}

void HostMoments::sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
                       bool divides, const float*, int threads) const {
  std::vector<Sent> items;
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Sending& by = sendings.at(i);
    auto* const before =
        by.before == nullptr ? m.residual.at[by.residual] : const_cast<uint8_t*>(by.before);
    items.push_back({{place(values, dtype, m), form_of(dtype)},
                     shape_of(m),
                     divides ? factors_of(m) : MatrixFactors{},
                     by.kept,
                     {before, m.residual.form},
                     {m.residual.at[1 - by.residual], m.residual.form},
                     {m.own.at[by.own], m.own.form}});
  }
  over_blocks(items, threads, sent_block);
}

void HostMoments::land(void* values, DType dtype, double unit, bool divides, int threads) const {
  const auto by_unit = static_cast<float>(unit);
  over_blocks(matrices_, threads, [&](const Matrix& m, size_t block, bool) {
    if (!divides && by_unit == 1) return;
    const Stored x{place(values, dtype, m), form_of(dtype)};
    const MatrixFactors by = factors_of(m);
    const Shape shape = shape_of(m);
    over_slices(shape, block, [&](size_t at, size_t count) {
      Slice room;
      auto* const made = const_cast<float*>(loaded(x, at, count, room));
      if (!divides) {
        scale_to(made, made, count, by_unit);
      } else {
        over_rows(shape, at, count, [&](size_t k, size_t n, size_t i, size_t j) {
          multiply_row(made + k, by.column + j, n, by.of_row(i) * by_unit);
        });
      }
      if (x.form != kFloat32) put(x, at, made, count, false);
    });
  });
  for (const Matrix& m : matrices_) {
    const Stored x{place(values, dtype, m), form_of(dtype)};
    Probe probe{};
    Slice room;
    for (size_t at = 0, end = std::min(kProbed, m.rows.values()); at < end; at += kSlice) {
      const size_t count = std::min(kSlice, end - at);
      const float* const found = loaded(x, at, count, room);
      for (size_t i = 0; i < count; i++) {
        look_at(probe, static_cast<uint32_t>(at + i), found[i]);
      }
    }
    room_of(m).numbers->probe = probed(probe, by_unit);
  }
}

void HostMoments::collect(float* sums, int) const {
  for (const Matrix& m : matrices_) {
    const Room room = room_of(m);
    const float steps = room.numbers->steps;
    const size_t behind = size_t{m.rows.all} + m.rows.columns;
    float* const out = sums + m.sums_at;
    std::copy(room.fresh, room.fresh + behind + kExtra, out);
    for (size_t i = 0; steps > 0 && i < behind + kOwn; i++) {  // projections are of this step alone
      out[i] = (room.since[i] + room.fresh[i]) / (steps + 1);
    }
    const float* const projections = room.fresh + behind + kOwn + 1;
    const auto square = [&](size_t k) { return projections[k] * projections[k]; };
    out[behind + kOwn] = Alone().total(kProjections, square);
  }
}

void HostMoments::commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
                         int) const {
  Alone thread;
  for (size_t i = 0; i < matrices_.size(); i++) {
    take_commit(thread, commit_params(matrices_[i], sums, how.at(i), ranks));
  }
}

void HostMoments::move(const std::vector<Step>& steps, DType dtype, int threads) const {
  std::vector<Move> items;
  for (const Step& step : steps) {
    const Matrix& m = matrices_.at(step.matrix);
    const Room room = room_of(m);
    const Numbers& numbers = *room.numbers;
    Move item{.x = {static_cast<uint8_t*>(step.values), form_of(dtype)},
              .shape = {m.rows.real(), m.rows.columns},
              .gradient = {static_cast<uint8_t*>(const_cast<void*>(step.gradient)), form_of(dtype)},
              .momentum = m.momentum,
              .by = {},
              .lr = static_cast<float>(step.lr),
              .keep = static_cast<float>(step.keep),
              .limit = numbers.steps > 0 ? static_cast<float>(step.limit) : 0.0f,
              .kept = step.kept,
              .moves = !step.divides || numbers.weight > 0};
    if (step.divides) {
      item.by = {room.reciprocal_row + m.rows.first, room.reciprocal_column, m.rows.real()};
    }
    if (item.moves && step.probed && numbers.probe.value[0] != 0) {
      float first, second;
      Slice room_of_one;
      first = *loaded(item.gradient, numbers.probe.at[0], 1, room_of_one);
      second = *loaded(item.gradient, numbers.probe.at[1], 1, room_of_one);
      const float tolerance = dtype == DType::float32 ? kTolerance : kTolerance16;
      item.kept *= restoring(numbers.probe, first, second, tolerance);
    }
    items.push_back(item);
  }
  over_blocks(items, threads, move_block);
}

}  // namespace pycomm::moments
