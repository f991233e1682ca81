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
    // The row with the most launches left goes on: the later ones are those of other rows, too, and
    // run once for all.
    const auto longest =
        std::max_element(rows_.begin(), rows_.end(),
                         [](const auto& a, const auto& b) { return a.size() < b.size(); });
    if (longest == rows_.end() || longest->empty()) break;
    const std::string kernel = longest->back().kernel;
    Launch all;
    for (auto& row : rows_) {
      if (row.empty() || row.back().kernel != kernel) continue;
      Launch launch = std::move(row.back());
      row.pop_back();
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
