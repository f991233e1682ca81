#include "optim/moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "codecs/base/feedback.h"
#include "codecs/base/launch.h"
#include "codecs/cast.h"
#include "core/error.h"
#include "optim/moments_passes.h"

namespace pycomm::moments {
namespace {

using feedback::Storage;

constexpr auto kFloat32 = static_cast<uint32_t>(Storage::float32);
constexpr auto kInt8 = static_cast<uint32_t>(Storage::int8);
static_assert(kLanes == 32 && kLanes == feedback::kBlock);

// ------------------------------------------------------------------------------ a warp of the host

// A vector of the compiler's, which each level of SIMD holds in as many registers as it needs.
using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));

/// A float of each lane. Four members and no array, which stay in registers.
struct Lanes {
  Eight a, b, c, d;

  Lanes() = default;
  PYCOMM_HD Lanes(Eight a, Eight b, Eight c, Eight d) : a(a), b(b), c(c), d(d) {}
  PYCOMM_HD Lanes(float x) : a{x, x, x, x, x, x, x, x}, b(a), c(a), d(a) {}

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
};
PYCOMM_HD Lanes operator+(const Lanes& x, const Lanes& y) {
  return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
}
PYCOMM_HD Lanes operator-(const Lanes& x, const Lanes& y) {
  return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d};
}
PYCOMM_HD Lanes operator*(const Lanes& x, const Lanes& y) {
  return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d};
}
PYCOMM_HD Lanes operator/(const Lanes& x, const Lanes& y) {
  return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d};
}
PYCOMM_HD void clamp(Eight& x, float limit) {
  const Eight most = {limit, limit, limit, limit, limit, limit, limit, limit};
  x = x > most ? most : x;
  x = x < -most ? -most : x;
}

template <typename Form>
PYCOMM_HD void decode(const uint16_t* codes, float* out) {
  for (size_t l = 0; l < kLanes; l++) out[l] = Form::decode(codes[l]);
}
template <typename Form>
PYCOMM_HD void encode(const float* in, uint16_t* codes) {
  for (size_t l = 0; l < kLanes; l++) codes[l] = Form::encode(in[l]);
}

/// Values of a dtype.
struct Array : Stored {
  Array(const void* at, DType dtype)
      : Stored{static_cast<uint8_t*>(const_cast<void*>(at)), form_of(dtype)} {}
  PYCOMM_HD bool is_float32() const { return form == kFloat32; }
  PYCOMM_HD float* floats() const { return reinterpret_cast<float*>(at); }
  PYCOMM_HD uint16_t* codes() const { return reinterpret_cast<uint16_t*>(at); }
  PYCOMM_HD float value(size_t i) const {
    return is_float32()       ? floats()[i]
           : form == kFloat16 ? codecs::cast::Float16::decode(codes()[i])
                              : codecs::cast::BFloat16::decode(codes()[i]);
  }
};

/// The places of neighbours in their matrix.
struct Place {
  const Rows& rows;
  size_t row, column;  // of the first

  PYCOMM_HD void next() {
    for (column += kLanes; column >= rows.columns; row++) column -= rows.columns;
  }
  PYCOMM_HD bool in_one_row() const { return column + kLanes <= rows.columns; }
  PYCOMM_HD Lanes by_row(const float* factors) const {
    if (in_one_row()) return factor_of(factors, rows, row);
    float by[kLanes];
    size_t i = row, j = column;
    for (float& each : by) {
      each = factor_of(factors, rows, i);
      if (++j == rows.columns) i++, j = 0;
    }
    return Lanes::at(by);
  }
  PYCOMM_HD Lanes by_column(const float* factors) const {
    if (in_one_row()) return Lanes::at(factors + column);
    float by[kLanes];
    size_t j = column;
    for (float& each : by) {
      each = factors[j];
      if (++j == rows.columns) j = 0;
    }
    return Lanes::at(by);
  }
};

struct Warp {
  using Lanes = moments::Lanes;
  static constexpr bool kGoesOn = true;  ///< squares take two rows of a block at a time
  /// put() writes past the caches, which do not hold the pass and would read the memory first.
  bool far;

  PYCOMM_HD static bool has(int k, int left) { return k * kApart < left; }
  PYCOMM_HD static size_t there(int left, int k) {
    const int count = left - k * kApart;
    return count <= 0 ? 0 : count < kApart ? static_cast<size_t>(count) : kLanes;
  }
  PYCOMM_HD static bool takes(int, int) { return true; }
  PYCOMM_HD static bool leads() { return true; }
  PYCOMM_HD static Place place(const Rows& rows, size_t i) {
    return {rows, i / rows.columns, i % rows.columns};
  }

  PYCOMM_HD static Lanes load(const float* from, size_t i, int left, int k, float beyond = 0.0f) {
    const size_t count = there(left, k);
    from += i + k * kLanes;
    if (count == kLanes) return Lanes::at(from);
    if (count == 0) return beyond;
    float room[kLanes];
    Lanes(beyond).to(room);
    std::memcpy(room, from, count * sizeof(float));
    return Lanes::at(room);
  }
  PYCOMM_HD static Lanes load(const void* from, uint32_t form, size_t i, int left, int k) {
    if (form == kFloat32) return load(static_cast<const float*>(from), i, left, k);
    const size_t count = there(left, k);
    if (count == 0) return 0.0f;
    i += k * kLanes;
    float room[2 * kLanes];
    if (form == kInt8) {
      const size_t before = i % feedback::kBlock;
      Lanes(0.0f).to(room + before);
      const auto* const blocks = static_cast<const uint8_t*>(from);
      feedback::load(Storage::int8, blocks + feedback::stored_bytes(Storage::int8, i - before),
                     {room, before + count});
      return Lanes::at(room + before);
    }
    const auto* codes = static_cast<const uint16_t*>(from) + i;
    uint16_t some[kLanes] = {};
    if (count < kLanes) {
      std::memcpy(some, codes, count * sizeof(uint16_t));
      codes = some;
    }
    form == kFloat16 ? decode<codecs::cast::Float16>(codes, room)
                     : decode<codecs::cast::BFloat16>(codes, room);
    return Lanes::at(room);
  }
  PYCOMM_HD static Lanes load(const Array& from, size_t i, int left, int k) {
    return load(from.at, from.form, i, left, k);
  }

  PYCOMM_HD static void store(float* to, size_t i, int left, int k, const Lanes& x) {
    const size_t count = there(left, k);
    to += i + k * kLanes;
    if (count == kLanes) return x.to(to);
    float room[kLanes];
    x.to(room);
    std::memcpy(to, room, count * sizeof(float));
  }
  PYCOMM_HD static void store(const Array& to, size_t i, int left, int k, const Lanes& x) {
    if (to.is_float32()) return store(to.floats(), i, left, k, x);
    float room[kLanes];
    uint16_t codes[kLanes];
    x.to(room);
    to.form == kFloat16 ? encode<codecs::cast::Float16>(room, codes)
                        : encode<codecs::cast::BFloat16>(room, codes);
    uint16_t* const at = to.codes() + i + k * kLanes;
    const size_t count = there(left, k);
    // Of a known size it is a vector's store.
    count == kLanes ? std::memcpy(at, codes, sizeof codes)
                    : std::memcpy(at, codes, count * sizeof(uint16_t));
  }
  PYCOMM_HD void put(const Array& to, size_t i, int left, int k, const Lanes& x) const {
#ifdef __SSE2__
    float* const at = to.floats() + i + k * kLanes;
    if (far && to.is_float32() && there(left, k) == kLanes &&
        reinterpret_cast<uintptr_t>(at) % 16 == 0) {
      float room[kLanes];
      x.to(room);
      for (size_t l = 0; l < kLanes; l += 4) _mm_stream_ps(at + l, _mm_loadu_ps(room + l));
      return;
    }
#endif
    store(to, i, left, k, x);
  }
  /// i is a multiple of kLanes.
  PYCOMM_HD void store(uint8_t* to, uint32_t form, size_t i, int left, int k,
                       const Lanes& x) const {
    if (form == kFloat32) return put({to, DType::float32}, i, left, k, x);
    float room[kLanes];
    x.to(room);
    const auto storage = static_cast<Storage>(form);
    feedback::store(storage, {room, there(left, k)},
                    to + feedback::stored_bytes(storage, i + k * kLanes));
  }

  PYCOMM_HD static Lanes clamped(Lanes x, float limit) {
    clamp(x.a, limit);
    clamp(x.b, limit);
    clamp(x.c, limit);
    clamp(x.d, limit);
    return x;
  }
  PYCOMM_HD static void look(Probe& probe, size_t i, int left, int k, const Lanes& x) {
    float room[kLanes];
    x.to(room);
    for (size_t l = 0; l < there(left, k); l++) {
      look_at(probe, static_cast<uint32_t>(i + k * kLanes + l), room[l]);
    }
  }
  PYCOMM_HD static float sum(const Lanes& x) {
    float lane[8];
    *reinterpret_cast<Eight*>(lane) = (x.a + x.c) + (x.b + x.d);
    for (size_t l = 0; l < 4; l++) lane[l] += lane[l + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
  }
};

// ------------------------------------------------------------------------------ a team

PYCOMM_SIMD float sum_of_patch(const float* patch, size_t count) {
  Lanes lanes(0.0f);
  const int left = static_cast<int>(count);
  for (int k = 0; Warp::has(k, left); k++) {
    lanes = lanes + Warp::load(patch, 0, left, k);
  }
  return Warp::sum(lanes);
}

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
      float patch[kPatch];
      const size_t end = std::min(kPatch, count - j);
      for (size_t k = 0; k < end; k++) patch[k] = at(j + k);
      sum += sum_of_patch(patch, end);
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
  bool leads() const { return true; }
  float fresh(const float* from) const { return *from; }
  void sync() const {}
};

// ------------------------------------------------------------------------------ passes

// A thread takes a block of rows, in the order of memory, or some patches of neighbours. Arguments
// are copied: what is stored could else change them, for all that the compiler knows.

PYCOMM_SIMD void square(const SquaresParams& given, DType dtype, size_t block, bool far) {
  const auto args = given;
  const Array values(args.values, dtype);
  const size_t end = std::min<size_t>(args.rows.real(), (block + 1) * kBlock);
  for (size_t i = block * kBlock; i < end; i += 2) {
    for (uint32_t patch = 0; patch < args.rows.patches(); patch++) {
      square_tile(Warp{far}, args, values, i, std::min(end, i + 2), patch);
    }
  }
}
PYCOMM_SIMD void encode(const EncodeParams& given, DType dtype, size_t block, bool far) {
  const auto args = given;
  const Array values(args.values, dtype), copy(args.copy, dtype);
  const size_t end = std::min<size_t>(args.rows.count, (block + 1) * kBlock);
  for (size_t i = block * kBlock; i < end; i++) {
    for (uint32_t patch = 0; patch < args.rows.patches(); patch++) {
      encode_tile(Warp{far}, args, values, copy, i, i + 1, patch);
    }
  }
}

constexpr size_t kTogether = 8;  ///< patches that a thread takes

PYCOMM_SIMD void send(const SentParams& given, DType dtype, size_t unit, bool far) {
  const auto args = given;
  for (size_t patch = unit * kTogether; patch < (unit + 1) * kTogether; patch++) {
    send_patch(Warp{far}, args, Array(args.values, dtype), patch);
  }
}
PYCOMM_SIMD void land(const LandParams& given, DType dtype, size_t unit, bool far) {
  const auto args = given;
  for (size_t patch = unit * kTogether; patch < (unit + 1) * kTogether; patch++) {
    land_patch(Warp{far}, args, Array(args.values, dtype), patch);
  }
}
PYCOMM_SIMD void move(const MoveParams& given, DType dtype, size_t unit, bool far) {
  const auto args = given;
  for (size_t patch = unit * kTogether; patch < (unit + 1) * kTogether; patch++) {
    move_patch(Warp{far}, args, Array(args.values, dtype), Array(args.gradient, dtype),
               Array(args.momentum, dtype), patch);
  }
}

/// A pass: the name of its kernel on a device, and what the host does for each unit of a shard, and
/// then for each shard. Null: nothing.
template <typename Params>
struct Kernel {
  const char* name;
  void (*take)(const Params&, DType, size_t unit, bool far);
  void (*finish)(const Params&, DType);
};
constexpr Kernel<SquaresParams> kSquares{"squares", square, [](const SquaresParams& args, DType) {
                                           if (args.rows.shard == 0) finish_squares(Alone(), args);
                                         }};
constexpr Kernel<EncodeParams> kEncode{"encode", encode, [](const EncodeParams& args, DType) {
                                         if (args.rows.shard == 0) finish_encode(Alone(), args);
                                       }};
constexpr Kernel<SentParams> kSent{"sent", send, nullptr};
constexpr Kernel<LandParams> kLand{"land", land, [](const LandParams& args, DType dtype) {
                                     Probe probe{};
                                     for (size_t patch = 0; patch < kProbed / kPatch; patch++) {
                                       look_at_patch(Warp{false}, args, Array(args.values, dtype),
                                                     patch, probe);
                                     }
                                     room_of(args).numbers->probe = probed(probe, args.unit);
                                   }};
constexpr Kernel<MoveParams> kMove{"move", move, nullptr};
constexpr Kernel<CollectParams> kCollect{
    "collect", nullptr, [](const CollectParams& args, DType) { write_means(Alone(), args); }};
constexpr Kernel<CommitParams> kCommit{
    "commit", nullptr, [](const CommitParams& args, DType) { take_commit(Alone(), args); }};

/// A pass over some matrices: loops of threads, or one launch.
template <typename Params>
class Run {
 public:
  Run(const Kernel<Params>& kernel, DType dtype) : kernel_(kernel), dtype_(dtype) {
    if (dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16) return;
    throw Error("moments: values are floats of 16 or 32 bits");
  }

  /// Adds a shard of so many values, which so many warps of a device take, or units of the host.
  void add(const Params& params, size_t warps, size_t units = 0, size_t values = 0) {
    shards_.push_back({params, warps, units});
    values_ += values;
  }

  /// The same of a pass that takes patches of neighbours.
  void add_neighbours(const Params& params) {
    const size_t values = params.rows.numel(), patches = (values + kPatch - 1) / kPatch;
    add(params, patches, (patches + kTogether - 1) / kTogether, values);
  }

  void start(const Where& where, const float* swapped = nullptr) const {
    where.stream.device == Device::cuda ? launch(where.stream, swapped) : loop(where.threads);
  }

 private:
  struct Shard {
    Params params;
    size_t warps, units;
  };

  void launch(const Stream& stream, const float* swapped) const {
    std::string kernel = std::string("pycomm::moments::") + kernel_.name;
    if (kernel_.take) {
      kernel = codecs::kernel_name(kernel, std::string(codecs::cast::type_name(dtype_)));
    }
    codecs::Batching batching(swapped);
    for (const Shard& shard : shards_) {
      batching.row();
      codecs::launch("moments", kernel, shard.params, shard.warps, 1, stream);
    }
    batching.start(stream);
  }

  void loop(int threads) const {
    constexpr size_t kFar = size_t{1} << 21;  // values from which caches do not hold a pass
    std::vector<std::pair<size_t, size_t>> places;
    for (size_t i = 0; kernel_.take && i < shards_.size(); i++) {
      for (size_t unit = 0; unit < shards_[i].units; unit++) places.emplace_back(i, unit);
    }
    spread(places.size(), values_, threads, [&](size_t n) {
      const auto& [i, unit] = places[n];
      kernel_.take(shards_[i].params, dtype_, unit, values_ >= kFar);
#ifdef __SSE2__
      if (values_ >= kFar) _mm_sfence();
#endif
    });
    if (!kernel_.finish) return;
    spread(shards_.size(), values_, threads,
           [&](size_t i) { kernel_.finish(shards_[i].params, dtype_); });
  }

  const Kernel<Params>& kernel_;
  const DType dtype_;
  size_t values_ = 0;
  std::vector<Shard> shards_;
};

/// Returns the arguments that all passes over a shard have.
template <typename Params>
Params params_of(const Matrix& m) {
  Params params{};
  params.room = m.room;
  params.rows = m.rows;
  return params;
}

/// Returns where a matrix's values are among those of a bucket; null: nowhere.
uint8_t* place(const void* values, DType dtype, const Matrix& m) {
  auto* at = static_cast<uint8_t*>(const_cast<void*>(values));
  return at == nullptr ? nullptr : at + m.offset * size_of(dtype);
}

}  // namespace

void Moments::square(const Pass& pass, const std::vector<Turn>& turns, bool is_new,
                     const Where& where) const {
  Run run(kSquares, pass.dtype);
  float* scratch = pass.scratch;
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Turn& turn = turns.at(i);
    auto params = params_of<SquaresParams>(m);
    params.values = place(pass.values, pass.dtype, m);
    params.bounds = m.row;
    params.scratch = scratch - m.rows.shard * m.rows.scratch_floats();
    scratch += m.rows.scratch_floats();
    if (turn.is_new != is_new) continue;
    params.signs = turn.signs;
    params.first = turn.first;
    params.stride = turn.stride;
    params.momentum = turn.momentum;
    params.unit = pass.unit;
    params.unit_squared = static_cast<float>(pass.unit * pass.unit);
    params.bound = pass.bound;
    params.ranks = pass.ranks;
    run.add(params, m.rows.blocks() * m.rows.patches(), m.rows.blocks(), m.rows.numel());
  }
  run.start(where);
}

void Moments::squares(const Pass& pass, const std::vector<Turn>& turns, const Where& where) const {
  square(pass, turns, true, where);
}

void Moments::encode(const Pass& pass, const std::vector<Turn>& turns, const Where& where) const {
  square(pass, turns, false, where);
  Run run(kEncode, pass.dtype);
  float* scratch = pass.scratch;
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Turn& turn = turns.at(i);
    auto params = params_of<EncodeParams>(m);
    params.values = place(pass.values, pass.dtype, m);
    params.momentum = turn.own < 0 ? m.momentum.at : m.own.at[turn.own];
    params.momentum_form = turn.own < 0 ? m.momentum.form : m.own.form;
    if (turn.signs != nullptr) {
      params.stored = m.residual.at[turn.residual];
      params.other_side = m.residual.at[1 - turn.residual];
    }
    params.form = m.residual.form;
    params.copy = place(pass.copy, pass.dtype, m);
    scratch += m.rows.scratch_floats();
    params.left = scratch - 2 * m.rows.cells();
    params.by_kept = 1.0f / turn.kept;
    params.divides = pass.divides ? 1 : 0;
    const size_t groups = (m.rows.count + kEncodeRows - 1) / kEncodeRows;
    run.add(params, groups * m.rows.patches(), m.rows.blocks(), m.rows.numel());
  }
  run.start(where, pass.swapped);
}

void Moments::sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
                   bool divides, const float* swapped, const Where& where) const {
  Run run(kSent, dtype);
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Sending& by = sendings.at(i);
    auto params = params_of<SentParams>(m);
    params.values = place(values, dtype, m);
    params.before = by.before == nullptr ? m.residual.at[by.residual] : by.before;
    params.after = m.residual.at[1 - by.residual];
    params.out = m.own.at[by.own];
    params.form = static_cast<uint8_t>(m.residual.form);
    params.out_form = static_cast<uint8_t>(m.own.form);
    params.divides = divides ? 1 : 0;
    params.kept = by.kept;
    run.add_neighbours(params);
  }
  run.start(where, swapped);
}

void Moments::land(void* values, DType dtype, double unit, bool divides, const Where& where) const {
  Run run(kLand, dtype);
  for (const Matrix& m : matrices_) {
    auto params = params_of<LandParams>(m);
    params.values = place(values, dtype, m);
    params.unit = static_cast<float>(unit);
    params.divides = divides ? 1 : 0;
    run.add_neighbours(params);
  }
  run.start(where);
}

void Moments::collect(float* sums, const Where& where) const {
  Run run(kCollect, DType::float32);
  for (const Matrix& m : matrices_) run.add({{}, m.room, sums + m.sums_at, m.rows}, 1);
  run.start(where);
}

void Moments::commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
                     const Where& where) const {
  Run run(kCommit, DType::float32);
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Commit& by = how.at(i);
    CommitParams params{};
    params.sums = sums == nullptr ? nullptr : sums + m.sums_at;
    params.room = m.room;
    params.row = m.row;
    params.column = m.column;
    params.heard = m.heard;
    params.rows = m.rows.all;
    params.columns = m.rows.columns;
    params.ranks = ranks;
    params.use = by.use;
    params.beta2 = by.beta2;
    params.eps = by.eps;
    run.add(params, 1);
  }
  run.start(where);
}

void Moments::move(const std::vector<Step>& steps, DType dtype, const Where& where) const {
  Run run(kMove, dtype);
  for (const Step& step : steps) {
    const Matrix& m = matrices_.at(step.matrix);
    auto params = params_of<MoveParams>(m);
    params.rows.count = m.rows.real();
    params.values = step.values;
    params.gradient = step.gradient;
    params.momentum = m.momentum.at;
    params.lr = static_cast<float>(step.lr);
    params.keep = static_cast<float>(step.keep);
    params.limit = static_cast<float>(step.limit);
    params.kept = step.kept;
    params.divides = step.divides ? 1 : 0;
    params.probed = step.probed ? 1 : 0;
    run.add_neighbours(params);
  }
  run.start(where);
}

}  // namespace pycomm::moments
