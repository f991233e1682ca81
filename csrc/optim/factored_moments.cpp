#include "optim/factored_moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/floats.h"
#include "optim/in_parallel.h"

namespace pycomm::factored_moments {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kTogether = 4;  // rows whose squares are taken together
constexpr size_t kBlock = 64;    // rows whose squares are added up before the others'
constexpr float kTiny = 1e-30f;

// A vector of the compiler's, which each level of SIMD holds in as many registers as it needs.
using Lanes = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

#define LANES_AT(p) (*reinterpret_cast<Lanes*>(p))
#define CONST_LANES_AT(p) (*reinterpret_cast<const Lanes*>(p))

/// Adds the lanes in a fixed order.
PYCOMM_HD float total(const float* lanes) {
  float half[8];
  for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; ++i) half[i] += half[i + 4];
  return (half[0] + half[2]) + (half[1] + half[3]);
}

/// The last columns of a row, fewer than there are lanes, with zeros behind them.
struct Tail {
  float at[kLanes] = {};
  Tail(const float* from, size_t count) {
    if (from) std::memcpy(at, from, 4 * count);
  }
};

/// Squares kRows rows of x, or with kRows = 1 one: their sums are written to `row`, and those of
/// their columns are added to `column`, which has room for a multiple of kLanes.
template <size_t kRows>
PYCOMM_HD void square(const float* x, size_t columns, float* row, float* column) {
  Lanes sums[kRows] = {};
  const size_t whole = columns / kLanes * kLanes;
  for (size_t j = 0; j < whole; j += kLanes) {
    Lanes added = {};
    for (size_t r = 0; r < kRows; ++r) {
      const Lanes squares =
          CONST_LANES_AT(x + r * columns + j) * CONST_LANES_AT(x + r * columns + j);
      sums[r] += squares;
      added += squares;
    }
    LANES_AT(column + j) += added;
  }
  if (whole < columns) {
    Lanes added = {};
    for (size_t r = 0; r < kRows; ++r) {
      Tail tail(x + r * columns + whole, columns - whole);
      const Lanes squares = LANES_AT(tail.at) * LANES_AT(tail.at);
      sums[r] += squares;
      added += squares;
    }
    LANES_AT(column + whole) += added;
  }
  for (size_t r = 0; r < kRows; ++r) {
    float lanes[kLanes];
    LANES_AT(lanes) = sums[r];
    row[r] = total(lanes);
  }
}

PYCOMM_SIMD void square_row(const float* x, size_t columns, float* row, float* column) {
  square<1>(x, columns, row, column);
}

PYCOMM_SIMD void square_rows(const float* x, size_t columns, float* row, float* column) {
  square<kTogether>(x, columns, row, column);
}

/// One row of `divide`; `column` and `momentum` have all columns.
PYCOMM_SIMD void divide_row(float* g, const float* momentum, const float* column, size_t columns,
                            float beta, float rest, float row) {
  if (!momentum) {
    for (size_t j = 0; j < columns; ++j) g[j] = g[j] * rest * row * column[j];
    return;
  }
  for (size_t j = 0; j < columns; ++j) {
    g[j] = (g[j] * rest + momentum[j] * beta) * row * column[j];
  }
}

/// Leaves a share of the gradient in one row of what `divide_row` has made of it.
PYCOMM_SIMD void keep_row(float* x, const float* momentum, const float* column, size_t columns,
                          float share, float other_share, float row) {
  for (size_t j = 0; j < columns; ++j) {
    x[j] = x[j] * share + momentum[j] * other_share * row * column[j];
  }
}

PYCOMM_SIMD void scale_row(float* x, size_t columns, float share) {
  for (size_t j = 0; j < columns; ++j) x[j] *= share;
}

PYCOMM_SIMD void multiply_row(float* x, const float* column, size_t columns, float row) {
  for (size_t j = 0; j < columns; ++j) x[j] = x[j] * row * column[j];
}

PYCOMM_SIMD void move_row(float* x, const float* g, float* momentum, const float* column,
                          size_t columns, float row, float lr, float keep, float limit) {
  if (limit == 0) {
    for (size_t j = 0; j < columns; ++j) {
      const float now = g[j];
      momentum[j] = now;
      x[j] = x[j] * keep - now * row * column[j] * lr;
    }
    return;
  }
  for (size_t j = 0; j < columns; ++j) {
    const float now = g[j];
    float moved = now * row * column[j];
    moved = moved > limit ? limit : moved;  // a NaN stays one
    moved = moved < -limit ? -limit : moved;
    momentum[j] = now;
    x[j] = x[j] * keep - moved * lr;
  }
}

PYCOMM_SIMD void fold_sums(float* moments, const float* sums, size_t count, float decay,
                           float weight) {
  for (size_t j = 0; j < count; ++j) moments[j] = moments[j] * decay + sums[j] * weight;
}

PYCOMM_SIMD void error_sums(const float* x, const float* e, size_t numel, float* left,
                            float* coded) {
  Lanes of_left = {}, of_coded = {};
  size_t j = 0;
  for (; j + kLanes <= numel; j += kLanes) {
    const Lanes error = CONST_LANES_AT(e + j);
    const Lanes both = CONST_LANES_AT(x + j) + error;
    of_left += error * error;
    of_coded += both * both;
  }
  if (j < numel) {
    Tail x_tail(x + j, numel - j), e_tail(e + j, numel - j);
    const Lanes error = LANES_AT(e_tail.at);
    const Lanes both = LANES_AT(x_tail.at) + error;
    of_left += error * error;
    of_coded += both * both;
  }
  float lanes[kLanes];
  LANES_AT(lanes) = of_left;
  *left = total(lanes);
  LANES_AT(lanes) = of_coded;
  *coded = total(lanes);
}

PYCOMM_SIMD void widen(const uint16_t* from, float* to, size_t numel) {
  for (size_t j = 0; j < numel; ++j) {
    const uint32_t word = uint32_t{from[j]} << 16;
    std::memcpy(to + j, &word, 4);
  }
}

PYCOMM_SIMD void narrow(const float* from, uint16_t* to, size_t numel) {
  for (size_t j = 0; j < numel; ++j) {
    to[j] = static_cast<uint16_t>(BFloat16::encode_saturating(from[j]));
  }
}

PYCOMM_SIMD void sent_row(const float* x, const float* before, const float* after,
                          const float* column, float* out, size_t columns, float row) {
  for (size_t j = 0; j < columns; ++j) out[j] = (x[j] + before[j] - after[j]) * row * column[j];
}

double plain_sum(const float* x, size_t count) {
  double sum = 0;
  for (size_t j = 0; j < count; ++j) sum += static_cast<double>(x[j]);
  return sum;
}

std::vector<float> reciprocals(const float* x, size_t count) {
  std::vector<float> result(count);
  for (size_t j = 0; j < count; ++j) result[j] = 1.0f / x[j];
  return result;
}

/// The sums by column of each thread, which are added up at the end.
class ColumnSums {
 public:
  ColumnSums(size_t columns, int threads) : columns_(columns), parts_(std::max(1, threads)) {}

  /// Adds the squares of up to kBlock rows; `then` gets each of them while it is in a cache.
  template <typename Then>
  void add(const Matrix& x, size_t begin, size_t end, size_t thread, const Squares& to,
           const Then& then) {
    std::vector<float>& part = parts_[thread];
    if (part.empty()) part.resize(columns_);
    std::vector<float> block(columns_ + kLanes);
    float squares[kTogether];
    for (size_t i = begin; i < end;) {
      const float* values = x.values + i * columns_;
      const size_t count = end - i < kTogether ? 1 : kTogether;
      (count > 1 ? square_rows : square_row)(values, columns_, squares, block.data());
      for (size_t r = 0; r < count; ++r, ++i) {
        to.row[i] += squares[r] * to.unit;
        then(i);
      }
    }
    for (size_t j = 0; j < columns_; ++j) part[j] += block[j];
  }

  /// Returns the total of all squares.
  double finish(const Squares& to) const {
    double total = 0;
    for (const std::vector<float>& part : parts_) {
      for (size_t j = 0; j < part.size(); ++j) to.column[j] += part[j] * to.unit;
      total += plain_sum(part.data(), part.size());
    }
    return total * static_cast<double>(to.unit);
  }

 private:
  size_t columns_;
  std::vector<std::vector<float>> parts_;
};

}  // namespace

void factors(const Sums& sums, float floor, float* row, float* column) {
  const double columns_total = plain_sum(sums.column, sums.columns);
  const auto total = std::max(kTiny, static_cast<float>(columns_total * sums.weight));
  const auto mean_row = static_cast<float>(columns_total / total / static_cast<double>(sums.rows));
  const auto mean_column =
      static_cast<float>(columns_total / static_cast<double>(std::max<size_t>(1, sums.columns)));
  const float least_row = std::max(kTiny, floor * std::sqrt(mean_row));
  const float least_column = std::max(kTiny, floor * std::sqrt(mean_column));
  for (size_t i = 0; i < sums.rows; ++i) {
    row[i] = std::max(least_row, std::sqrt(sums.row[i] / total));
  }
  for (size_t j = 0; j < sums.columns; ++j) {
    column[j] = std::max(least_column, std::sqrt(sums.column[j]));
  }
}

void reciprocal_factors(const Sums& sums, size_t all_rows, float least, float floor, float* row,
                        float* column) {
  const float by_column = least * static_cast<float>(all_rows);
  const float by_row = least * static_cast<float>(sums.columns);
  const double columns_total = plain_sum(sums.column, sums.columns) +
                               static_cast<double>(by_column) * static_cast<double>(sums.columns);
  const auto total = static_cast<float>(columns_total * sums.weight);
  const auto mean_row = static_cast<float>(columns_total / static_cast<double>(all_rows));
  const auto mean_column =
      static_cast<float>(columns_total / static_cast<double>(std::max<size_t>(1, sums.columns)));
  const float least_row = floor * floor * mean_row, least_column = floor * floor * mean_column;
  for (size_t i = 0; i < sums.rows; ++i) {
    row[i] = std::sqrt(total / std::max(least_row, sums.row[i] + by_row));
  }
  for (size_t j = 0; j < sums.columns; ++j) {
    column[j] = 1 / std::sqrt(std::max(least_column, sums.column[j] + by_column));
  }
}

void fold(const NewSums& by, float* row, float* column) {
  fold_sums(row, by.row, by.rows, by.decay, by.weight);
  fold_sums(column, by.column, by.columns, by.decay, by.weight);
}

void add_squares(const Matrix& x, const Squares& sums, int threads) {
  ColumnSums columns(x.columns, threads);
  in_parallel(x.rows, x.columns, kBlock, threads, [&](size_t begin, size_t end, size_t thread) {
    for (size_t i = begin; i < end; i += kBlock) {
      columns.add(x, i, std::min(end, i + kBlock), thread, sums, [](size_t) {});
    }
  });
  columns.finish(sums);
}

void divide(const Matrix& g, const Divide& by, int threads) {
  const std::vector<float> column = reciprocals(g.column, g.columns);
  const float rest = (1 - by.beta) * by.unit;
  ColumnSums sums(g.columns, threads);
  const auto divide_one = [&](size_t i) {
    const bool known = by.momentum && i < by.known;
    divide_row(g.values + i * g.columns, known ? by.momentum + i * g.columns : nullptr,
               column.data(), g.columns, by.beta, rest, 1.0f / g.row[i]);
  };
  in_parallel(g.rows, g.columns, kBlock, threads, [&](size_t begin, size_t end, size_t thread) {
    if (!by.squares.row) {
      for (size_t i = begin; i < end; ++i) divide_one(i);
      return;
    }
    for (size_t i = begin; i < end; i += kBlock) {
      sums.add(g, i, std::min(end, i + kBlock), thread, by.squares, divide_one);
    }
  });
  if (!by.squares.row) return;
  const double energy = sums.finish(by.squares);
  if (by.most == 0 || energy <= static_cast<double>(by.most)) return;
  const auto share = static_cast<float>(std::sqrt(static_cast<double>(by.most) / energy));
  for (size_t i = 0; i < g.rows; ++i) {
    float* const values = g.values + i * g.columns;
    if (by.momentum && i < by.known) {
      keep_row(values, by.momentum + i * g.columns, column.data(), g.columns, share,
               (1 - share) * by.beta, 1.0f / g.row[i]);
    } else {
      scale_row(values, g.columns, share);
    }
  }
}

void multiply(const Matrix& x, float unit, int threads) {
  in_parallel(x.rows, x.columns, kBlock, threads, [&](size_t begin, size_t end, size_t) {
    for (size_t i = begin; i < end; ++i) {
      multiply_row(x.values + i * x.columns, x.column, x.columns, x.row[i] * unit);
    }
  });
}

void move(const Matrix& x, const Move& by, int threads) {
  in_parallel(x.rows, x.columns, kBlock, threads, [&](size_t begin, size_t end, size_t) {
    for (size_t i = begin; i < end; ++i) {
      const size_t at = i * x.columns;
      move_row(x.values + at, by.gradient + at, by.momentum + at, x.column, x.columns, x.row[i],
               by.lr, by.keep, by.limit);
    }
  });
}

void sent(const Matrix& x, const Sent& by, int threads) {
  in_parallel(x.rows, x.columns, kBlock, threads, [&](size_t begin, size_t end, size_t) {
    constexpr size_t kSlice = 1024;
    float before[kSlice], after[kSlice], out[kSlice];
    // Returns float32 values, widened into a buffer if need be.
    const auto values = [&](const void* from, size_t at, size_t count, float* wide) {
      if (!by.residual_bf16) return static_cast<const float*>(from) + at;
      widen(static_cast<const uint16_t*>(from) + at, wide, count);
      return static_cast<const float*>(wide);
    };
    for (size_t i = begin; i < end; ++i) {
      for (size_t j = 0; j < x.columns; j += kSlice) {
        const size_t at = i * x.columns + j, count = std::min(kSlice, x.columns - j);
        float* to = by.out_bf16 ? out : static_cast<float*>(by.out) + at;
        sent_row(x.values + at, values(by.before, at, count, before),
                 values(by.after, at, count, after), x.column + j, to, count, x.row[i]);
        if (by.out_bf16) narrow(out, static_cast<uint16_t*>(by.out) + at, count);
      }
    }
  });
}

Errors errors(const float* x, const void* residual, bool bf16, size_t numel) {
  constexpr size_t kSlice = 1024;
  Errors result{0, 0};
  float wide[kSlice];
  for (size_t begin = 0; begin < numel; begin += kSlice) {
    const size_t count = std::min(kSlice, numel - begin);
    const float* e = static_cast<const float*>(residual) + begin;
    if (bf16) {
      widen(static_cast<const uint16_t*>(residual) + begin, wide, count);
      e = wide;
    }
    float left, coded;
    error_sums(x + begin, e, count, &left, &coded);
    result.left += left;
    result.coded += coded;
  }
  return result;
}

}  // namespace pycomm::factored_moments
