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

/// Adds of(at) to a sum, with `at` as in over_lanes(), of whole patches of a row or its last.
template <typename Of>
PYCOMM_HD float added(float sum, size_t count, const Of& of) {
  Lanes lanes;
  over_lanes(
      count, [&](size_t, const auto& at) PYCOMM_INLINED { lanes = lanes + of(at); },
      [&]() PYCOMM_INLINED {
        sum += lanes.total();
        lanes = {};
      });
  return sum;
}

PYCOMM_SIMD float total(const float* x, size_t count) {
  return added(0, count, [&](const auto& at) PYCOMM_INLINED { return at(x); });
}

/// Returns the sum of the products.
PYCOMM_SIMD float project(const float* x, const float* signs, size_t count) {
  return added(0, count, [&](const auto& at) PYCOMM_INLINED { return at(x) * at(signs); });
}

/// Adds to two sums the squares of e, and those of x + e.
PYCOMM_SIMD void add_errors(const float* x, const float* e, size_t count, float& left,
                            float& coded) {
  left = added(left, count, [&](const auto& at) PYCOMM_INLINED { return at(e) * at(e); });
  coded = added(coded, count, [&](const auto& at) PYCOMM_INLINED {
    const Lanes both = at(x) + at(e);
    return both * both;
  });
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

/// The same where nothing divides, which takes a tenth less.
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

/// `out` may be x.
PYCOMM_SIMD void multiply_row(const float* x, const float* __restrict column, float* out,
                              size_t count, float row) {
  for (size_t j = 0; j < count; j++) out[j] = x[j] * row * column[j];
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

/// The same without denominators, in one pass with what is kept, which takes a third less.
PYCOMM_SIMD void move_plainly(float* __restrict x, const float* __restrict g, float* __restrict out,
                              size_t count, float lr, float keep, float kept) {
  for (size_t j = 0; j < count; j++) {
    out[j] = g[j] * kept;
    x[j] = x[j] * keep - g[j] * lr;
  }
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

/// In the place of the factors of a slice's columns where nothing divides.
const std::vector<float> kOnes(kSlice, 1.0f);

/// Factors by row, which are 1 behind the last real one, and by column. Nulls: all are 1.
struct MatrixFactors {
  const float* row = nullptr;
  const float* column = nullptr;
  size_t real = 0;

  float of_row(size_t i) const { return row && i < real ? row[i] : 1.0f; }
  /// Returns those of the columns of a slice, from column j on.
  const float* of_columns(size_t j) const { return column ? column + j : kOnes.data(); }
};

size_t blocks_of(size_t rows) { return (rows + kBlock - 1) / kBlock; }

Room room_of(const Matrix& m) { return room_at(m.room, m.rows.all, m.rows.columns); }

MatrixFactors factors_of(const Matrix& m) {
  const Room room = room_of(m);
  return {room.by_row + m.rows.first, room.by_column, m.rows.real()};
}

/// Calls act(at, count) for slices of a block of rows.
template <typename Act>
void over_slices(const Rows& x, size_t block, const Act& act) {
  const size_t end = std::min<size_t>(x.count, (block + 1) * kBlock) * x.columns;
  for (size_t at = block * kBlock * x.columns; at < end; at += kSlice) {
    act(at, std::min(kSlice, end - at));
  }
}

/// Calls act(k, n, i, j) for the n values of a slice from its value k on, which are in row i from
/// column j on.
template <typename Act>
void over_rows(const Rows& x, size_t at, size_t count, const Act& act) {
  for (size_t k = 0, n; k < count; k += n) {
    const size_t i = (at + k) / x.columns, j = (at + k) % x.columns;
    n = std::min(count - k, x.columns - j);
    act(k, n, i, j);
  }
}

/// Calls act(i, block, far) for each block of rows of matrices; `far`: see put().
template <typename Act>
void over_blocks(const std::vector<Rows>& matrices, int threads, const Act& act) {
  std::vector<std::pair<size_t, size_t>> places;
  size_t values = 0;
  for (size_t i = 0; i < matrices.size(); i++) {
    for (size_t b = 0; b < matrices[i].blocks(); b++) places.emplace_back(i, b);
    values += matrices[i].numel();
  }
  const bool far = values >= kFar;
  spread(places.size(), values, threads, [&](size_t n) {
    act(places[n].first, places[n].second, far);
#ifdef __SSE2__
    if (far) _mm_sfence();
#endif
  });
}

// ------------------------------------------------------------------------------ encode

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

/// The work of `squares` and of `encode` on a shard.
class Encoding {
 public:
  /// `room` is zeros, room_for(m) of them.
  Encoding(const Matrix& m, const Turn& turn, const Pass& pass, bool encodes, float* room)
      : m_(m),
        turn_(turn),
        pass_(pass),
        shape_(m.rows),
        real_(m.rows.real()),
        encodes_(encodes),
        looks_(!encodes || !turn.is_new),
        floats_({place(pass.values, pass.dtype, m), form_of(pass.dtype)}, m.rows.numel()),
        copy_{place(pass.copy, pass.dtype, m), form_of(pass.dtype)},
        kept_(room_of(m)),
        extra_(kept_.fresh + m.rows.all + m.rows.columns),
        width_(width_of(m)),
        rows_(room),
        errors_(rows_ + real_),
        reciprocals_(errors_ + 2 * shape_.count),
        columns_(reciprocals_ + width_) {
    if (looks_ && m.rows.shard == 0) std::fill(kept_.fresh, extra_ + kExtra, 0.0f);
    if (!encodes) return;
    set_step(*kept_.numbers, turn.momentum, pass.unit);
    beta_ = kept_.numbers->beta * (1.0f / turn.kept);
    if (pass.divides) by_ = factors_of(m);
    if (beta_ > 0) momentum_ = turn.own < 0 ? m.momentum : Stored{m.own.at[turn.own], m.own.form};
    if (turn.signs) residual_ = {m.residual.at[turn.residual], m.residual.form};
    for (size_t j = 0; j < shape_.columns; j++) {
      reciprocals_[j] = by_.column ? 1.0f / by_.column[j] : 1.0f;
    }
  }

  static size_t room_for(const Matrix& m) {
    const size_t real = m.rows.real();
    return real + 2 * m.rows.count + width_of(m) * (1 + blocks_of(real));
  }

  /// Goes over a block of rows.
  void take(size_t block, bool far) {
    const size_t first = block * kBlock, end = std::min<size_t>(shape_.count, first + kBlock);
    for (size_t i = first; i < end; i += 2) {
      const size_t stop = std::min(end, i + 2);
      if (looks_) look(i, stop);
      for (size_t r = i; encodes_ && r < stop; r++) divide(r, far);
    }
  }

  /// Adds up what the blocks have found, and scales a gradient down that is too large.
  void finish() {
    if (looks_ && add_up()) {
      for (size_t b = 0; b < shape_.blocks(); b++) bound(b);
    }
    for (size_t k = 0; residual_.at && k < 2; k++) {
      extra_[kLeft + k] += total(errors_ + k * shape_.count, shape_.count);
    }
    if (encodes_) floats_.write(copy_);
  }

 private:
  /// Returns whether the gradient is to be scaled down.
  bool add_up() {
    const auto unit = static_cast<float>(pass_.unit * pass_.unit);
    add_times(kept_.fresh + m_.rows.first, rows_, unit, real_);
    for (size_t b = 1; b < blocks_of(real_); b++) {
      add_times(columns_, columns_ + b * width_, 1.0f, shape_.columns);
    }
    if (real_) add_times(kept_.fresh + m_.rows.all, columns_, unit, shape_.columns);
    const Numbers& numbers = *kept_.numbers;
    if (!(numbers.weight > 0)) return false;
    const float energy = total(rows_, real_) * unit;
    const float allowed = total(m_.row + m_.rows.first, real_);
    const float most = std::max(kTiny, allowed * most_of(numbers, pass_.bound, pass_.ranks));
    if (!(energy > most)) return false;
    share_ = std::sqrt(most / energy);
    return true;
  }

  bool has_momentum(size_t i) const { return momentum_.at && i < real_; }

  /// Scales the gradient down in a block of rows.
  void bound(size_t block) {
    const float other = (1 - share_) * beta_;
    const size_t end = std::min<size_t>(shape_.count, (block + 1) * kBlock);
    Slice room;
    for (size_t i = block * kBlock; i < end; i++) {
      for (size_t j = 0; j < shape_.columns; j += kSlice) {
        const size_t count = std::min(kSlice, shape_.columns - j), at = i * shape_.columns + j;
        float* const p = floats_.at() + at;
        if (has_momentum(i)) {
          const float* m = loaded(momentum_, at, count, room);
          bound_row(p, m, reciprocals_ + j, count, share_, other, 1.0f / by_.of_row(i));
        } else {
          scale_to(p, p, count, share_);
        }
        written(i, at, count, p, room, j == 0, false);
      }
    }
  }

  /// Adds squares and projections of up to two rows.
  void look(size_t begin, size_t end) {
    const float* x = floats_.at() + begin * shape_.columns;
    const size_t count = std::min(end, real_) - std::min(begin, real_);
    if (count > 0) {
      const float* const y = count == 2 ? x + shape_.columns : nullptr;
      square_rows(x, y, shape_.columns, &rows_[begin], &columns_[begin / kBlock * width_]);
    }
    if (!turn_.signs) return;
    for (size_t i = m_.rows.first + begin; i < m_.rows.first + begin + count; i++) {
      if (i >= turn_.first && (i - turn_.first) % turn_.stride == 0) {
        float& to = extra_[kOwn + 1 + (i - turn_.first) / turn_.stride];
        to = to + project(x, turn_.signs, shape_.columns) * static_cast<float>(pass_.unit);
      }
      x += shape_.columns;
    }
  }

  void divide(size_t i, bool far) {
    const float row = 1.0f / by_.of_row(i), rest = kept_.numbers->rest;
    Slice room;
    for (size_t j = 0; j < shape_.columns; j += kSlice) {
      const size_t count = std::min(kSlice, shape_.columns - j), at = i * shape_.columns + j;
      float* const g = floats_.at() + at;
      if (has_momentum(i)) {
        const float* const m = loaded(momentum_, at, count, room);
        if (by_.row) {
          divide_row(g, m, reciprocals_ + j, count, beta_, rest, row);
        } else {
          blend_row(g, m, count, beta_, rest);
        }
      } else {
        divide_alone(g, reciprocals_ + j, count, rest, row);
      }
      written(i, at, count, g, room, j == 0, far);
    }
  }

  /// Takes note of values that are to be coded.
  void written(size_t i, size_t at, size_t count, const float* p, Slice& room, bool first,
               bool far) {
    if (copy_.at && copy_.form == kFloat32) put(floats_at(copy_) + at, p, count, far);
    if (!residual_.at) return;
    float &left = errors_[i], &coded = errors_[shape_.count + i];
    if (first) left = coded = 0;
    add_errors(p, loaded(residual_, at, count, room), count, left, coded);
  }

  /// Room for the sums of a block's columns.
  static size_t width_of(const Matrix& m) {
    return (m.rows.columns + kLanes - 1) / kLanes * kLanes;
  }

  const Matrix& m_;
  const Turn& turn_;
  const Pass& pass_;
  const Rows& shape_;
  const size_t real_;  // rows before the padding
  const bool encodes_, looks_;
  Floats floats_;  // g, which becomes p
  const Stored copy_;
  const Room kept_;
  float* const extra_;  // behind the sums
  const size_t width_;
  float* const rows_;         // sums of squares [real]
  float* const errors_;       // two sums [2, rows]
  float* const reciprocals_;  // of the columns' factors
  float* const columns_;      // sums of squares [blocks, width]
  MatrixFactors by_ = {};
  Stored momentum_ = {};  // null: it is left out
  Stored residual_ = {};  // null: its errors are not wanted
  float beta_ = 0, share_ = 1;
};

/// Adds up the squares of new matrices' gradients; or those of the others, and encodes all.
void take_turns(const std::vector<Matrix>& matrices, const Pass& pass,
                const std::vector<Turn>& turns, int threads, bool encodes) {
  std::vector<size_t> chosen;
  size_t numel = 0, values = 0;
  for (size_t i = 0; i < matrices.size(); i++) {
    if (!encodes && !turns.at(i).is_new) continue;
    chosen.push_back(i);
    numel += Encoding::room_for(matrices[i]);
  }
  // Kept from call to call: pages of fresh memory would cost as much as the sums.
  thread_local std::vector<float> room;
  room.assign(numel, 0.0f);
  float* next = room.data();
  std::vector<Encoding> all;
  all.reserve(chosen.size());
  std::vector<Rows> shapes;
  std::vector<size_t> groups;  // the first shard of each matrix, and the end
  for (const size_t i : chosen) {
    const Matrix& m = matrices[i];
    if (m.rows.shard == 0) groups.push_back(all.size());
    all.emplace_back(m, turns.at(i), pass, encodes, next);
    shapes.push_back(m.rows);
    next += Encoding::room_for(m);
    values += m.rows.numel();
  }
  groups.push_back(all.size());
  over_blocks(shapes, threads, [&](size_t i, size_t block, bool far) { all[i].take(block, far); });
  // Shards add to the same sums, one after the other.
  spread(groups.size() - 1, values, threads, [&](size_t g) {
    for (size_t i = groups[g]; i < groups[g + 1]; i++) all[i].finish();
  });
}

std::vector<Rows> shapes_of(const std::vector<Matrix>& matrices) {
  std::vector<Rows> shapes;
  for (const Matrix& m : matrices) shapes.push_back(m.rows);
  return shapes;
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

}  // namespace

void HostMoments::squares(const Pass& pass, const std::vector<Turn>& turns, int threads) const {
  take_turns(matrices_, pass, turns, threads, false);
}

void HostMoments::encode(const Pass& pass, const std::vector<Turn>& turns, int threads) const {
  take_turns(matrices_, pass, turns, threads, true);
}

void HostMoments::sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
                       bool divides, const float*, int threads) const {
  over_blocks(shapes_of(matrices_), threads, [&](size_t i, size_t block, bool far) {
    const Matrix& m = matrices_[i];
    const Sending& by = sendings.at(i);
    auto* const stored = const_cast<uint8_t*>(by.before);
    const Stored x{place(values, dtype, m), form_of(dtype)};
    const Stored before{stored ? stored : m.residual.at[by.residual], m.residual.form};
    const Stored after{m.residual.at[1 - by.residual], m.residual.form};
    const Stored own{m.own.at[by.own], m.own.form};
    const MatrixFactors factors = divides ? factors_of(m) : MatrixFactors{};
    over_slices(m.rows, block, [&](size_t at, size_t count) {
      Slice given, kept, fresh, out;
      const float *const coded = loaded(x, at, count, given), *e = nullptr, *left = nullptr;
      if (before.at) {
        e = loaded(before, at, count, kept);
        left = loaded(after, at, count, fresh);
      }
      over_rows(m.rows, at, count, [&](size_t k, size_t n, size_t r, size_t j) {
        const float row = factors.of_row(r) * by.kept;
        if (e) {
          sent_row(coded + k, e + k, left + k, factors.of_columns(j), out + k, n, row);
        } else {
          multiply_row(coded + k, factors.of_columns(j), out + k, n, row);
        }
      });
      if (own.form == kFloat32) {
        put(floats_at(own) + at, out, count, far);
      } else {
        feedback::store(static_cast<Storage>(own.form), {out, count}, from(own, at).at);
      }
    });
  });
}

void HostMoments::land(void* values, DType dtype, double unit, bool divides, int threads) const {
  const auto by_unit = static_cast<float>(unit);
  over_blocks(shapes_of(matrices_), threads, [&](size_t number, size_t block, bool) {
    if (!divides && by_unit == 1) return;
    const Matrix& m = matrices_[number];
    const Stored x{place(values, dtype, m), form_of(dtype)};
    const MatrixFactors by = divides ? factors_of(m) : MatrixFactors{};
    over_slices(m.rows, block, [&](size_t at, size_t count) {
      Slice room;
      auto* const made = const_cast<float*>(loaded(x, at, count, room));
      over_rows(m.rows, at, count, [&](size_t k, size_t n, size_t i, size_t j) {
        multiply_row(made + k, by.of_columns(j), made + k, n, by.of_row(i) * by_unit);
      });
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
  Alone thread;
  for (const Matrix& m : matrices_) write_means(thread, collect_params(m, sums));
}

void HostMoments::commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
                         int) const {
  Alone thread;
  for (size_t i = 0; i < matrices_.size(); i++) {
    take_commit(thread, commit_params(matrices_[i], sums, how.at(i), ranks));
  }
}

void HostMoments::move(const std::vector<Step>& steps, DType dtype, int threads) const {
  std::vector<Rows> shapes;
  for (const Step& step : steps) {
    shapes.push_back(matrices_.at(step.matrix).rows);
    shapes.back().count = shapes.back().real();
  }
  over_blocks(shapes, threads, [&](size_t number, size_t block, bool far) {
    const Step& step = steps[number];
    const Matrix& m = matrices_[step.matrix];
    const Room room = room_of(m);
    const Numbers& numbers = *room.numbers;
    const Stored x{static_cast<uint8_t*>(step.values), form_of(dtype)};
    const Stored gradient{static_cast<uint8_t*>(const_cast<void*>(step.gradient)), form_of(dtype)};
    MatrixFactors by;
    if (step.divides) {
      by = {room.reciprocal_row + m.rows.first, room.reciprocal_column, m.rows.real()};
    }
    const bool known = !step.divides || numbers.weight > 0;
    float to_keep = step.kept;
    if (known && step.probed && numbers.probe.value[0] != 0) {
      Slice one;
      const float first = *loaded(gradient, numbers.probe.at[0], 1, one);
      const float second = *loaded(gradient, numbers.probe.at[1], 1, one);
      const float tolerance = dtype == DType::float32 ? kTolerance : kTolerance16;
      to_keep *= restoring(numbers.probe, first, second, tolerance);
    }
    const auto lr = static_cast<float>(step.lr), keep = static_cast<float>(step.keep);
    const float limit = numbers.steps > 0 ? static_cast<float>(step.limit) : 0.0f;
    over_slices(shapes[number], block, [&](size_t at, size_t count) {
      Slice given, scaled, values;
      const float* const g = loaded(gradient, at, count, given);
      auto* const moved = const_cast<float*>(loaded(x, at, count, values));
      const float* const kept = step.divides && to_keep == 1 ? g : scaled;
      if (!step.divides) {
        move_plainly(moved, g, scaled, count, lr, keep, to_keep);
      } else if (to_keep != 1) {
        scale_to(g, scaled, count, to_keep);
      }
      if (step.divides && known) {
        over_rows(shapes[number], at, count, [&](size_t k, size_t n, size_t i, size_t j) {
          move_row(moved + k, kept + k, by.of_columns(j), n, by.of_row(i), lr, keep, limit);
        });
      }
      if (known && x.form != kFloat32) put(x, at, moved, count, false);
      put(m.momentum, at, kept, count, far);
    });
  });
}

}  // namespace pycomm::moments
