#include "core/warning.h"

#include <cstdio>
#include <mutex>
#include <set>

namespace pycomm {
namespace {

struct Output {
  std::mutex mutex;
  std::set<std::string> said;
  std::function<void(const std::string&)> say = [](const std::string& text) {
    std::fprintf(stderr, "pycomm: %s\n", text.c_str());
  };
};

// Never destroyed: threads may warn while the process exits.
Output& output() {
  static auto* const output = new Output;
  return *output;
}

}  // namespace

void warn_once(const std::string& text) {
  std::function<void(const std::string&)> say;
  {
    const std::lock_guard<std::mutex> lock(output().mutex);
    if (!output().said.insert(text).second) return;
    say = output().say;
  }
  say(text);
}

void set_warning_output(std::function<void(const std::string&)> say) {
  const std::lock_guard<std::mutex> lock(output().mutex);
  output().say = std::move(say);
}

}  // namespace pycomm
