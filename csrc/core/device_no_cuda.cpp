// Interface to GPUs in a build without CUDA: there is none, and the CPU functions still work.
#include <cstring>

#include "core/device.h"
#include "core/error.h"

namespace pycomm::device {
namespace {

[[noreturn]] void fail() {
  throw Error("cuda: this pycomm was built without CUDA; install pycomm-cuda13");
}

void refuse(Stream stream) {
  if (stream.device != Device::cpu) fail();
}

}  // namespace

bool built() { return false; }
int count() noexcept { return 0; }
Properties properties(int) { fail(); }

Guard::Guard(int index) : before_(-1) {
  if (index >= 0) fail();
}
Guard::~Guard() = default;

std::shared_ptr<void> allocate(int, size_t) { fail(); }
std::shared_ptr<void> map_host(void*, size_t) { fail(); }
bool reaches(int, int) { fail(); }
void connect(int, int) { fail(); }
std::string export_memory(const void*) { fail(); }
std::shared_ptr<void> import_memory(int, const std::string&) { fail(); }

void copy(void* to, const void* from, size_t bytes, Stream stream) {
  refuse(stream);
  if (bytes > 0) std::memmove(to, from, bytes);
}

void synchronize(Stream stream) { refuse(stream); }

bool is_capturing(Stream stream) {
  refuse(stream);
  return false;
}

std::shared_ptr<void> make_stream(int) { fail(); }

}  // namespace pycomm::device
