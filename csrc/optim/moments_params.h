// What the passes over moments have in common on all processors: the order of sums (moments.h), and
// the arguments of the kernels of a device. Compiled by gcc, nvcc and NVRTC.
#pragma once
#ifndef __CUDACC_RTC__
#include <cmath>
#endif

#include "codecs/base/batch.h"
#include "core/types.h"

namespace pycomm::moments {

constexpr size_t kLanes = 32, kPatch = 256, kBlock = 64, kProjections = 64;
constexpr size_t kEncodeRows = 8;  ///< that a warp takes in `encode` on a device
constexpr float kTiny = 1e-30f;

/// Least factor of a row or column, relative to their root mean square; less of what is heard in
/// most steps.
constexpr float kFloor = 0.1f;

/// The rows of a matrix that a pass takes: all of them, or those of a shard, which is coded by
/// itself. Behind the matrix's rows there is padding.
struct Rows {
  uint32_t all, columns;   ///< of the matrix
  uint32_t first, count;   ///< the rows, of which some may be padding
  uint16_t shard, shards;  ///< the number among the shards that are coded here, and their number

  PYCOMM_HD uint32_t real() const {
    const uint32_t there = first < all ? all - first : 0;
    return there < count ? there : count;
  }
  /// Another shard, all of which follow each other.
  PYCOMM_HD Rows of_shard(uint32_t number) const {
    return {all,   columns, first + (number - shard) * count, count, static_cast<uint16_t>(number),
            shards};
  }
  PYCOMM_HD size_t numel() const { return size_t{count} * columns; }
  /// Without padding.
  PYCOMM_HD size_t values() const { return size_t{real()} * columns; }
  PYCOMM_HD size_t patches() const { return (columns + kPatch - 1) / kPatch; }
  PYCOMM_HD size_t cells() const { return count * patches(); }
  PYCOMM_HD size_t blocks() const { return (count + kBlock - 1) / kBlock; }
  /// Floats of Parts in moments.cu, and of parts of the sums of errors behind them.
  PYCOMM_HD size_t scratch_floats() const {
    return 3 * cells() + count + blocks() * columns + kProjections * patches();
  }
};

// How evenly the rows and columns of a matrix are heard: moving averages of the share that each has
// in the squares of a step, relative to the mean one, and of its square.
constexpr double kHeardDecay = 0.99;  ///< in a step
constexpr float kEven = 0.5f;         ///< from which evenness on the floor is the least one
constexpr float kLeastShare = 1e-4f;  ///< of the floor's square

/// Returns what the averages are multiplied by after some steps.
PYCOMM_HD double heard_decay(int steps) {
  double decay = 1;
  for (int k = 0; k < steps; k++) decay *= kHeardDecay;
  return decay;
}

/// Lets the share of a row or column in the squares of some steps, `more` besides one, enter its
/// averages, of which `known` is the mean of all means: 1 but for what they have not heard yet. A
/// mean over steps differs from one time to the next by less than a step's share does: its variance
/// is a part of theirs.
PYCOMM_HD void hear(float& mean, float& square, float share, float known, float more, float decay,
                    float rest) {
  const float away = known > kTiny ? share - mean / known : 0.0f;
  mean = mean * decay + share * rest;
  square = square * decay + (share * share + away * away * more) * rest;
}

/// Returns the share that a row or column has of the floor's square. The square of a mean over the
/// mean of squares is 1 where shares are the same in all steps, and the part of the steps in which
/// it is heard where it is silent in the others; less while the averages are young.
PYCOMM_HD float floor_share(float mean, float square) {
  const float even = mean * mean / (square < kTiny ? kTiny : square);
  const float share = 1 - even / kEven;
  return share < kLeastShare ? kLeastShare : share;
}

/// Two values of a momentum as a step gets it: the largest and the smallest that is not 0, of the
/// first kProbed without padding. They tell a step by how much its gradient was multiplied since:
/// clipping scales gradients, of which Adam's steps do not depend, and here they are the momentum.
struct Probe {
  uint32_t at[2];
  float value[2];  ///< 0: it is not known
};
constexpr size_t kProbed = 2048;

/// Takes note of value i of the first kProbed, in any order.
PYCOMM_HD void look_at(Probe& probe, uint32_t i, float value) {
  const float size = value < 0 ? -value : value;
  if (!(size > 0)) return;
  const float largest = probe.value[0] < 0 ? -probe.value[0] : probe.value[0];
  const float smallest = probe.value[1] < 0 ? -probe.value[1] : probe.value[1];
  if (size > largest || (size == largest && i < probe.at[0])) {
    probe.at[0] = i;
    probe.value[0] = value;
  }
  if (smallest == 0 || size < smallest || (size == smallest && i < probe.at[1])) {
    probe.at[1] = i;
    probe.value[1] = value;
  }
}

/// Returns a probe of landed values, divided by their unit.
PYCOMM_HD Probe probed(Probe probe, float unit) {
  for (float& value : probe.value) value = value / unit;
  return probe;
}

/// Returns what gradients, of which `first` and `second` stand at the places of a probe, have to be
/// multiplied by to be what they were. 1: they are that, or were changed otherwise.
/// `tolerance`: of the values' rounding.
PYCOMM_HD float restoring(const Probe& probe, float first, float second, float tolerance) {
  if (probe.value[0] == 0 || probe.at[0] == probe.at[1]) return 1.0f;
  const float by = first / probe.value[0], other = second / probe.value[1];
  if (!(by > 1e-12f && by < 1e12f)) return 1.0f;
  const float change = by > 1 ? by - 1 : 1 - by;
  const float apart = other > by ? other - by : by - other;
  return change <= tolerance || !(apart <= tolerance * by) ? 1.0f : 1.0f / by;
}
constexpr float kTolerance = 0x1p-16f, kTolerance16 = 0x1p-6f;  ///< of float32; of 16 bits

/// Numbers behind the sums of a matrix by row and by column: the squares of what the last coding
/// has left, of its input, and of this rank's projections; then these projections.
constexpr size_t kLeft = 0, kCoded = 1, kOwn = 2, kExtra = 3 + kProjections;

/// What is known of a matrix's moment. The first five, and `decay`, are equal on all ranks.
struct Numbers {
  float weight;  ///< of the second moments, which are sums times this
  float coding_error, mean_energy, own_energy;
  float steps;  ///< whose sums wait for an exchange
  // Of the current step: p = (g rest + m beta) / d, and of a shard whose gradient is too large
  // p share + m (1 - share) beta / d; Room has the shares.
  float beta, rest, unused;
  double decay;      ///< of second moments in those steps and this one
  uint32_t done[2];  ///< blocks of threads that are done with a pass; zeros between passes
  Probe probe;
};
static_assert(sizeof(Numbers) == 64);

/// Returns the squares of the ranks' mean over the mean of their squares, between 1 / ranks and 1.
/// It is rounded, so that the order in which squares were added up does not matter.
PYCOMM_HD double share_of(double of_mean, double own, uint32_t ranks) {
  if (!(own > 0)) return 1.0;
  const double least = 1.0 / ranks, found = of_mean / own;
  const double bounded = found > least ? found : least;
  return rint(256 * (bounded < 1.0 ? bounded : 1.0)) / 256;
}

/// Returns the most that the squares of a shard's gradient count, as a multiple of the sum of its
/// rows of the second moments.
PYCOMM_HD float most_of(const Numbers& numbers, float bound, uint32_t ranks) {
  const double own = numbers.weight * share_of(numbers.mean_energy, numbers.own_energy, ranks);
  return static_cast<float>(double{bound} * bound / own);
}

/// Returns the coefficient of a coded momentum that has the horizon of an exact one; `error`: share
/// of its squares that the coding leaves to the next step. It is rounded down, so that the order in
/// which errors were added up does not matter.
PYCOMM_HD double shortened(double momentum, double error) {
  if (error == 0) return momentum;
  error = error < 0.99 ? error : 0.99;
  const double found = floor(1024 * (momentum - error) / (1 - error)) / 1024;
  return found > 0 ? found : 0.0;
}

/// Sets what a mean momentum and the gradient are multiplied by in a step.
PYCOMM_HD void set_step(Numbers& numbers, double momentum, double unit) {
  const double beta = shortened(momentum, numbers.coding_error);
  numbers.beta = static_cast<float>(beta);
  numbers.rest = static_cast<float>((1 - beta) * unit);
}

/// Moves a number by a share of 1 - decay to a new one, and returns it.
PYCOMM_HD double decayed(float& number, double decay, double now) {
  number = static_cast<float>(decay * number + (1 - decay) * now);
  return number;
}

/// What sums are multiplied by, and new ones, when these enter the second moments.
struct Folding {
  float decay, weight;
};

/// Lets the ranks' means of what stands behind the sums enter the numbers. `of_mean`: the squares
/// of the projections' means. `decay`: of second moments since the sums of before.
PYCOMM_HD Folding fold_numbers(Numbers& numbers, double left, double coded, double own,
                               double of_mean, double decay, uint32_t ranks) {
  const double mean_energy = decayed(numbers.mean_energy, decay, of_mean);
  const double own_energy = decayed(numbers.own_energy, decay, own);
  decayed(numbers.weight, decay, 1.0);
  if (left > 0 && coded > 0) {
    const double error = left / coded;
    decayed(numbers.coding_error, 0.75, error < 1.0 ? error : 1.0);
  }
  numbers.decay = 1.0;
  numbers.steps = 0;
  const double share = share_of(mean_energy, own_energy, ranks);
  return {static_cast<float>(decay), static_cast<float>((1 - decay) * share)};
}

/// What is kept of a matrix beside the optimizer's state, one behind the other.
struct Room {
  Numbers* numbers;
  float* fresh;   ///< sums of this step [rows + columns + kExtra]
  float* since;   ///< and of the steps that wait for an exchange
  float* by_row;  ///< factors of the denominators in the next coding
  float* by_column;
  float* inverse_row;  ///< and 1 over these
  float* inverse_column;
  float* reciprocal_row;  ///< and the reciprocals of the denominators in the next step
  float* reciprocal_column;
  float* shares;  ///< [shards]: how much of a shard's gradient counts
};
PYCOMM_HD Room room_at(float* at, size_t rows, size_t columns) {
  const size_t sums = rows + columns + kExtra;
  float* const fresh = at + sizeof(Numbers) / sizeof(float);
  float* const by_row = fresh + 2 * sums;
  float* const inverse_row = by_row + rows + columns;
  float* const reciprocal_row = inverse_row + rows + columns;
  return {reinterpret_cast<Numbers*>(at),
          fresh,
          fresh + sums,
          by_row,
          by_row + rows,
          inverse_row,
          inverse_row + rows,
          reciprocal_row,
          reciprocal_row + rows,
          reciprocal_row + rows + columns};
}

/// Forms of momenta and residuals: those of feedback::Storage, and float16.
constexpr uint32_t kBFloat16 = 2, kFloat16 = 3;

// Arguments of the kernels. Members are those of moments.h; `room` is a Room.

/// Of `squares` and `encode`.
struct CodingParams {
  codecs::Blocks blocks;
  void* values;
  float* room;
  const float* bounds;     ///< [rows.all]
  float* scratch;          ///< of all shards
  float* left;             ///< [2, rows, patches] of the shard, for parts of the sums of errors
  const float* signs;      ///< null: rows have no projections
  uint32_t first, stride;  ///< the rows that have one, counted from the first of all
  double beta1;            ///< coefficient of an exact momentum
  double unit;
  float unit_squared;
  float bound;  ///< g's squares count at most bound^2 times the second moment
  const void* momentum;
  const uint8_t* stored;      ///< the residual; null: its errors are not wanted
  const uint8_t* other_side;  ///< in place of it, if the batch says so
  void* copy;                 ///< null: nowhere
  Rows rows;
  uint16_t momentum_form, form;
  uint32_t ranks;    ///< that average their momenta
  float by_kept;     ///< by which the momentum is a mean one
  uint16_t divides;  ///< 0: factors are 1
  uint16_t looks;    ///< 0: squares were added up before
  uint32_t encodes;  ///< not 0: the host encodes in the pass that adds up squares
};
static_assert(sizeof(CodingParams) <= 160);  // launches have room for 25 matrices

struct SentParams {
  codecs::Blocks blocks;
  const void* values;
  float* room;
  const uint8_t* before;  ///< null: there is no residual
  const uint8_t* after;
  uint8_t* out;
  Rows rows;
  uint8_t form, out_form;
  uint16_t divides;  ///< 0: factors are 1
  float kept;
  uint32_t swapped;  ///< not 0: `before` and `after` are exchanged
};
static_assert(sizeof(SentParams) <= 80);

struct LandParams {
  codecs::Blocks blocks;
  void* values;
  float* room;
  Rows rows;
  float unit;
  uint32_t divides;  ///< 0: factors are 1
};

struct MoveParams {
  codecs::Blocks blocks;
  void* values;
  float* room;
  const void* gradient;
  void* momentum;
  Rows rows;
  float lr, keep;
  float limit;  ///< while second moments are some steps old
  float kept;
  uint16_t divides, probed;  ///< 0: no
};
static_assert(sizeof(MoveParams) <= 80);  // launches have room for 50 matrices

struct CollectParams {
  codecs::Blocks blocks;
  float* room;
  float* out;
  Rows rows;
};

/// What `commit` does with the ranks' sums.
enum Use : uint32_t {
  kNothing = 0,  ///< factors are computed of the second moments as they are
  kStep = 1,     ///< a step is taken
  kScale = 2,    ///< they are the scale of the first coding, and no second moments yet
};

struct CommitParams {
  codecs::Blocks blocks;
  const float* sums;  ///< of all ranks; null: they were not exchanged
  float* room;
  float* row;  ///< of the second moments
  float* column;
  float* heard;  ///< [2, rows + columns]: means, and squares; see hear()
  uint32_t rows, columns;
  uint32_t ranks;
  uint32_t use;  ///< Use
  double beta2, eps;
};
static_assert(sizeof(CommitParams) <= 80);

/// What all values of a tensor have in common in a step of AdamW, in the order of its formula.
struct Factors {
  float rest1;  ///< 1 - beta1
  float beta2, rest2;
  float keep;  ///< what weight decay leaves
  float lr;    ///< over the momentum's correction
  float root;  ///< of the squares' correction
  float eps;
};

struct AdamWParams {
  codecs::Blocks blocks;
  float* values;
  const float* gradient;
  float* momentum;
  float* squares;
  uint64_t numel;
  Factors by;
  uint32_t unused;
};

}  // namespace pycomm::moments
