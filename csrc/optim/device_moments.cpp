#include "optim/device_moments.h"

#include "codecs/cast.h"
#include "core/error.h"

namespace pycomm::moments {
namespace {

using codecs::Batching;

size_t patches_of(const DeviceMatrix& m) { return (m.columns + kPatch - 1) / kPatch; }
size_t blocks_of(const DeviceMatrix& m) { return (m.rows + kBlock - 1) / kBlock; }
size_t numel_of(const DeviceMatrix& m) { return size_t{m.rows} * m.columns; }

size_t cells_of(const DeviceMatrix& m) { return size_t{m.rows} * patches_of(m); }

/// Floats of Parts in moments.cu, and of parts of the sums of errors behind them.
size_t scratch_of(const DeviceMatrix& m) {
  return 3 * cells_of(m) + m.rows + blocks_of(m) * m.columns + kProjections * patches_of(m);
}

/// Forms of moments_params.h.
uint32_t form_of(const Stored& stored) { return static_cast<uint32_t>(stored.storage); }
uint32_t form_of(DType dtype) {
  if (dtype == DType::float32) return static_cast<uint32_t>(feedback::Storage::float32);
  return dtype == DType::float16 ? kFloat16 : static_cast<uint32_t>(feedback::Storage::bfloat16);
}

size_t bytes_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

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
Params params_of(const DeviceMatrix& m) {
  Params params{};
  params.room = m.room;
  params.rows = m.rows;
  params.columns = m.columns;
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

uint8_t* place(const void* values, DType dtype, const DeviceMatrix& m) {
  auto* at = static_cast<uint8_t*>(const_cast<void*>(values));
  return at == nullptr ? nullptr : at + m.offset * bytes_of(dtype);
}

}  // namespace

size_t DeviceMoments::scratch_floats() const {
  size_t floats = 0;
  for (const DeviceMatrix& m : matrices_) floats += scratch_of(m);
  return floats;
}

void DeviceMoments::squares(const void* values, DType dtype, const std::vector<Turn>& turns,
                            float* scratch, double unit, double bound, uint32_t ranks,
                            const Stream& stream) const {
  for_all(matrices_, stream, nullptr, [&](const DeviceMatrix& m, size_t i) {
    const Turn& turn = turns.at(i);
    auto params = params_of<SquaresParams>(m);
    params.values = place(values, dtype, m);
    params.bounds = m.row;
    params.scratch = scratch;
    params.signs = turn.signs;
    params.first = turn.first;
    params.stride = turn.stride;
    params.momentum = turn.momentum;
    params.unit = static_cast<float>(unit);
    params.unit_squared = static_cast<float>(unit * unit);
    params.bound = static_cast<float>(bound);
    params.ranks = ranks;
    run(name("squares", dtype), params, blocks_of(m) * patches_of(m), 1, stream);
    scratch += scratch_of(m);
  });
}

void DeviceMoments::encode(void* values, DType dtype, const std::vector<Turn>& turns, void* copy,
                           float* scratch, bool divides, const float* swapped,
                           const Stream& stream) const {
  for_all(matrices_, stream, swapped, [&](const DeviceMatrix& m, size_t i) {
    const Turn& turn = turns.at(i);
    auto params = params_of<EncodeParams>(m);
    params.values = place(values, dtype, m);
    params.momentum = turn.own < 0 ? m.momentum : m.own.at[turn.own];
    params.momentum_form = turn.own < 0 ? m.momentum_form : m.own.form;
    if (turn.signs != nullptr) {
      params.stored = m.residual.at[turn.residual];
      params.other_side = m.residual.at[1 - turn.residual];
    }
    params.form = m.residual.form;
    params.copy = place(copy, dtype, m);
    params.left = scratch + scratch_of(m) - 2 * cells_of(m);
    params.divides = divides ? 1 : 0;
    run(name("encode", dtype), params, (m.rows + kEncodeRows - 1) / kEncodeRows * patches_of(m), 1,
        stream);
    scratch += scratch_of(m);
  });
}

void DeviceMoments::sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
                         const float* swapped, const Stream& stream) const {
  for_all(matrices_, stream, swapped, [&](const DeviceMatrix& m, size_t i) {
    const Sending& by = sendings.at(i);
    auto params = params_of<SentParams>(m);
    params.values = place(values, dtype, m);
    params.before = by.before == nullptr ? m.residual.at[by.residual] : by.before;
    params.after = m.residual.at[1 - by.residual];
    params.out = m.own.at[by.own];
    params.form = m.residual.form;
    params.out_form = m.own.form;
    run(name("sent", dtype), params, numel_of(m), kPatch, stream);
  });
}

void DeviceMoments::land(void* values, DType dtype, double unit, bool divides,
                         const Stream& stream) const {
  for_all(matrices_, stream, nullptr, [&](const DeviceMatrix& m, size_t) {
    auto params = params_of<LandParams>(m);
    params.values = place(values, dtype, m);
    params.unit = static_cast<float>(unit);
    params.divides = divides ? 1 : 0;
    run(name("land", dtype), params, numel_of(m), kPatch, stream);
  });
}

void DeviceMoments::collect(float* sums, const Stream& stream) const {
  for_all(matrices_, stream, nullptr, [&](const DeviceMatrix& m, size_t) {
    auto params = params_of<CollectParams>(m);
    params.out = sums + m.sums_at;
    run("pycomm::moments::collect", params, size_t{m.rows} + m.columns + kExtra, cuda::kLanes,
        stream);
  });
}

void DeviceMoments::commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
                           const Stream& stream) const {
  for_all(matrices_, stream, nullptr, [&](const DeviceMatrix& m, size_t i) {
    auto params = params_of<CommitParams>(m);
    params.sums = sums == nullptr ? nullptr : sums + m.sums_at;
    params.row = m.row;
    params.column = m.column;
    params.heard = m.heard;
    params.ranks = ranks;
    params.use = how.at(i).use;
    params.beta2 = how[i].beta2;
    params.eps = how[i].eps;
    run("pycomm::moments::commit", params, 1, 1, stream);  // one block
  });
}

void DeviceMoments::move(const std::vector<Step>& steps, DType dtype, const Stream& stream) const {
  for_all(steps, stream, nullptr, [&](const Step& step, size_t) {
    const DeviceMatrix& m = matrices_.at(step.matrix);
    auto params = params_of<MoveParams>(m);
    params.values = step.values;
    params.gradient = step.gradient;
    params.gradient_form = form_of(dtype);
    params.momentum = m.momentum;
    params.lr = static_cast<float>(step.lr);
    params.keep = static_cast<float>(step.keep);
    params.limit = static_cast<float>(step.limit);
    params.probed = step.probed ? 1 : 0;
    run(name("move", dtype), params, numel_of(m), kPatch, stream);
  });
}

void encode_on_device(const std::vector<Encode>& matrices, float* scratch, const Stream& stream) {
  for_all(matrices, stream, nullptr, [&](const Encode& one, size_t) {
    DeviceMatrix m{};
    m.rows = static_cast<uint32_t>(one.rows);
    m.columns = static_cast<uint32_t>(one.columns);
    auto params = params_of<EncodeParams>(m);
    params.values = one.values;
    params.gradient = one.gradient.at;
    params.gradient_form = form_of(one.gradient);
    params.parameter = one.parameter.at;
    params.parameter_form = form_of(one.parameter);
    params.momentum = one.momentum.at;
    params.momentum_form = form_of(one.momentum);
    params.beta = one.beta;
    params.rest = one.rest;
    params.decay = one.decay;
    params.copy = one.copy;
    if (one.errors != nullptr) {
      params.stored = params.other_side = one.residual.at;
      params.form = form_of(one.residual);
      params.errors = one.errors;
      params.left = scratch;
      scratch += 2 * cells_of(m);
    }
    run(name("encode", DType::float32), params,
        (one.rows + kEncodeRows - 1) / kEncodeRows * patches_of(m), 1, stream);
  });
}

void sent_on_device(const std::vector<Sent>& matrices, const Stream& stream) {
  for_all(matrices, stream, nullptr, [&](const Sent& one, size_t) {
    SentParams params{};
    params.values = one.x.values;
    params.rows = static_cast<uint32_t>(one.x.rows);
    params.columns = static_cast<uint32_t>(one.x.columns);
    params.before = one.before.at;
    params.after = one.after.at;
    params.out = one.out;
    params.form = form_of(one.before);
    params.out_form = static_cast<uint32_t>(one.storage);
    run(name("sent", DType::float32), params, one.x.rows * one.x.columns, kPatch, stream);
  });
}

void move_on_device(const std::vector<Move>& matrices, DType dtype, const Stream& stream) {
  for_all(matrices, stream, nullptr, [&](const Move& one, size_t) {
    MoveParams params{};
    params.values = one.x.values;
    params.rows = static_cast<uint32_t>(one.x.rows);
    params.columns = static_cast<uint32_t>(one.x.columns);
    params.gradient = one.gradient;
    params.momentum = one.momentum;
    params.lr = one.lr;
    params.keep = one.keep;
    run(name("move", dtype), params, one.x.rows * one.x.columns, kPatch, stream);
  });
}

}  // namespace pycomm::moments
