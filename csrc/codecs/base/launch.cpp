// Launches are recorded here; codecs/cuda.cu starts them.
#include "codecs/base/launch.h"

#include <utility>

namespace pycomm::codecs {

namespace {
thread_local Recording* recording = nullptr;
}

Recording::Recording() { recording = this; }
Recording::~Recording() { recording = nullptr; }

void run(const char* codec, Launch launch, const Stream& stream) {
  if (recording == nullptr) return start(codec, launch, stream);
  recording->launches.push_back(std::move(launch));
}

}  // namespace pycomm::codecs
