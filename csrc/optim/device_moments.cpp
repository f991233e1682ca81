#include "optim/device_moments.h"

#include "codecs/cast.h"
#include "core/error.h"

namespace pycomm::moments {
namespace {

using codecs::Batching;

/// Returns the name of a kernel for values of a dtype.
std::string name(const char* kernel, DType dtype) {
  if (dtype != DType::float32 && dtype != DType::bfloat16 && dtype != DType::float16) {
    throw Error("moments on a GPU: values are floats of 16 or 32 bits");
  }
  return codecs::kernel_name(std::string("pycomm::moments::") + kernel,
                             std::string(codecs::cast::type_name(dtype)));
}

/// Returns the arguments that all kernels of a matrix have.
template <typename Params>
Params params_of(const Matrix& m) {
  Params params{};
  params.room = m.room;
  params.rows = m.rows;
  return params;
}

template <typename Params>
void run(std::string kernel, const Params& params, size_t items, size_t each,
         const Stream& stream) {
  codecs::launch("moments", std::move(kernel), params, items, each, stream);
}

/// Calls act(item, i) for each item, which lists its launches, and starts them together.
template <typename Items, typename Act>
void for_all(const Items& items, const Stream& stream, const float* swapped, const Act& act) {
  Batching batching(swapped);
  for (size_t i = 0; i < items.size(); i++) {
    batching.row();
    act(items[i], i);
  }
  batching.start(stream);
}

}  // namespace

void DeviceMoments::square(const Pass& pass, const std::vector<Turn>& turns, bool is_new,
                           const Stream& stream) const {
  float* scratch = pass.scratch;
  for_all(matrices_, stream, nullptr, [&](const Matrix& m, size_t i) {
    const Turn& turn = turns.at(i);
    auto params = params_of<SquaresParams>(m);
    params.values = place(pass.values, pass.dtype, m);
    params.bounds = m.row;
    params.scratch = scratch - m.rows.shard * m.rows.scratch_floats();
    scratch += m.rows.scratch_floats();
    if (turn.is_new != is_new) return;
    params.signs = turn.signs;
    params.first = turn.first;
    params.stride = turn.stride;
    params.momentum = turn.momentum;
    params.unit = pass.unit;
    params.unit_squared = static_cast<float>(pass.unit * pass.unit);
    params.bound = pass.bound;
    params.ranks = pass.ranks;
    run(name("squares", pass.dtype), params, m.rows.blocks() * m.rows.patches(), 1, stream);
  });
}

void DeviceMoments::squares(const Pass& pass, const std::vector<Turn>& turns,
                            const Stream& stream) const {
  square(pass, turns, true, stream);
}

void DeviceMoments::encode(const Pass& pass, const std::vector<Turn>& turns,
                           const Stream& stream) const {
  square(pass, turns, false, stream);
  float* scratch = pass.scratch;
  for_all(matrices_, stream, pass.swapped, [&](const Matrix& m, size_t i) {
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
    run(name("encode", pass.dtype), params, groups * m.rows.patches(), 1, stream);
  });
}

void DeviceMoments::sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
                         bool divides, const float* swapped, const Stream& stream) const {
  for_all(matrices_, stream, swapped, [&](const Matrix& m, size_t i) {
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
    run(name("sent", dtype), params, m.rows.numel(), kPatch, stream);
  });
}

void DeviceMoments::land(void* values, DType dtype, double unit, bool divides,
                         const Stream& stream) const {
  for_all(matrices_, stream, nullptr, [&](const Matrix& m, size_t) {
    auto params = params_of<LandParams>(m);
    params.values = place(values, dtype, m);
    params.unit = static_cast<float>(unit);
    params.divides = divides ? 1 : 0;
    run(name("land", dtype), params, m.rows.numel(), kPatch, stream);
  });
}

void DeviceMoments::collect(float* sums, const Stream& stream) const {
  for_all(matrices_, stream, nullptr, [&](const Matrix& m, size_t) {
    run("pycomm::moments::collect", collect_params(m, sums), 1, 1, stream);  // one block
  });
}

void DeviceMoments::commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
                           const Stream& stream) const {
  for_all(matrices_, stream, nullptr, [&](const Matrix& m, size_t i) {
    run("pycomm::moments::commit", commit_params(m, sums, how.at(i), ranks), 1, 1, stream);
  });
}

void DeviceMoments::move(const std::vector<Step>& steps, DType dtype, const Stream& stream) const {
  for_all(steps, stream, nullptr, [&](const Step& step, size_t) {
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
    run(name("move", dtype), params, params.rows.numel(), kPatch, stream);
  });
}

}  // namespace pycomm::moments
