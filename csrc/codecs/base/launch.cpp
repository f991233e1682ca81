// Launches are batched and recorded here; codecs/cuda.cu starts them.
#include "codecs/base/launch.h"

#include <algorithm>
#include <cstring>

namespace pycomm::codecs {

namespace {
thread_local Batching* batching = nullptr;
thread_local Recording* recording = nullptr;
}  // namespace

bool Launch::add(const Launch& other) {
  if (count() + other.count() > batch_room(bytes)) return false;
  const size_t begin = tensors.size();
  tensors.insert(tensors.end(), other.tensors.begin(), other.tensors.end());
  for (size_t at = begin; at < tensors.size(); at += bytes) {
    Blocks own;
    std::memcpy(&own, &tensors[at], sizeof own);
    own.first += blocks;
    std::memcpy(&tensors[at], &own, sizeof own);
  }
  blocks += other.blocks;
  return true;
}

std::vector<uint8_t> Launch::argument() const {
  const uint64_t number = count();
  std::vector<uint8_t> batch(sizeof number + batch_room(bytes) * bytes);
  std::memcpy(batch.data(), &number, sizeof number);
  std::copy(tensors.begin(), tensors.end(), batch.begin() + sizeof number);
  return batch;
}

Batching::Batching() : outer_(batching) { batching = this; }
Batching::~Batching() { batching = outer_; }

void Batching::start(const Stream& stream) {
  batching = outer_;
  std::vector<size_t> next(rows_.size());
  // True if the row runs the kernel after its next launch.
  const auto comes_later = [&](size_t r, const std::string& kernel) {
    const auto& row = rows_[r];
    const auto is = [&](const Launch& launch) { return launch.kernel == kernel; };
    return next[r] < row.size() && !is(row[next[r]]) &&
           std::any_of(row.begin() + next[r], row.end(), is);
  };
  for (;;) {
    // Of the kernels that can run now, the first for which no other row has to come further first.
    const std::string* chosen = nullptr;
    bool waits = true;
    for (size_t r = 0; r < rows_.size() && waits; r++) {
      if (next[r] == rows_[r].size()) continue;
      const std::string& kernel = rows_[r][next[r]].kernel;
      waits = false;
      for (size_t other = 0; other < rows_.size() && !waits; other++) {
        waits = comes_later(other, kernel);
      }
      if (!chosen || !waits) chosen = &kernel;
    }
    if (!chosen) break;
    const std::string kernel = *chosen;
    Launch all;
    for (size_t r = 0; r < rows_.size(); r++) {
      if (next[r] == rows_[r].size() || rows_[r][next[r]].kernel != kernel) continue;
      const Launch& launch = rows_[r][next[r]++];
      if (all.bytes == 0) {
        all = launch;
      } else if (!all.add(launch)) {
        run(std::move(all), stream);
        all = launch;
      }
    }
    run(std::move(all), stream);
  }
  rows_.clear();
  batching = this;
}

Recording::Recording() { recording = this; }
Recording::~Recording() { recording = nullptr; }

void run(Launch launch, const Stream& stream) {
  if (batching != nullptr) return batching->hold(std::move(launch));
  if (recording == nullptr) return start(launch, stream);
  recording->launches.push_back(std::move(launch));
}

}  // namespace pycomm::codecs
