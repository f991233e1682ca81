// Launches are batched and recorded here; codecs/cuda.cu starts them.
#include "codecs/base/launch.h"

#include <algorithm>
#include <cstring>
#include <string_view>

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
  const BatchHead head{count(), swapped};
  std::vector<uint8_t> batch(sizeof head + batch_room(bytes) * bytes);
  std::memcpy(batch.data(), &head, sizeof head);
  std::copy(tensors.begin(), tensors.end(), batch.begin() + sizeof head);
  return batch;
}

Batching::Batching(const float* swapped) : swapped_(swapped), outer_(batching) { batching = this; }
Batching::~Batching() { batching = outer_; }

void Batching::start(const Stream& stream) {
  batching = outer_;
  for (auto& row : rows_) std::reverse(row.begin(), row.end());  // the next launch is the last one
  for (;;) {
    // By kernel: the rows whose next launch it is, and whether others run it later.
    struct Ready {
      std::string_view kernel;
      std::vector<size_t> rows;
      bool comes_later = false;
    };
    std::vector<Ready> ready;
    const auto find = [&](std::string_view kernel) {
      return std::find_if(ready.begin(), ready.end(),
                          [&](const Ready& one) { return one.kernel == kernel; });
    };
    for (size_t r = 0; r < rows_.size(); r++) {
      if (rows_[r].empty()) continue;
      const std::string_view kernel = rows_[r].back().kernel;
      const auto known = find(kernel);
      (known == ready.end() ? ready.emplace_back(Ready{kernel, {}}) : *known).rows.push_back(r);
    }
    if (ready.empty()) break;
    for (const auto& row : rows_) {
      for (const Launch& launch : row) {
        if (&launch == &row.back() || launch.kernel == row.back().kernel) continue;
        const auto known = find(launch.kernel);
        if (known != ready.end()) known->comes_later = true;
      }
    }
    // The first one that no row runs later, so that it need not run twice.
    auto chosen =
        std::find_if(ready.begin(), ready.end(), [](const Ready& one) { return !one.comes_later; });
    if (chosen == ready.end()) chosen = ready.begin();
    Launch all;
    for (const size_t r : chosen->rows) {
      Launch launch = std::move(rows_[r].back());
      rows_[r].pop_back();
      if (all.bytes == 0) {
        all = std::move(launch);
      } else if (!all.add(launch)) {
        run(std::move(all), stream);
        all = std::move(launch);
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
