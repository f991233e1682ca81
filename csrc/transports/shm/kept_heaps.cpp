#include "transports/shm/kept_heaps.h"

#include <cstdlib>
#include <set>

namespace pycomm {

std::string KeptHeaps::value(const KeptHeaps* heaps) {
  if (heaps == nullptr || heaps->heap->taken_back()) return "none";
  return std::to_string(heaps->name) + " " + std::to_string(heaps->own);
}

std::vector<uint32_t> KeptHeaps::numbers(const std::vector<std::string>& values) {
  std::vector<uint32_t> numbers;
  std::set<std::string> names;
  for (const std::string& value : values) {
    const size_t space = value.find(' ');
    if (space == std::string::npos) return {};
    names.insert(value.substr(0, space));
    numbers.push_back(static_cast<uint32_t>(std::strtoul(value.c_str() + space, nullptr, 10)));
  }
  const std::set<uint32_t> different(numbers.begin(), numbers.end());
  if (names.size() != 1 || different.size() != numbers.size()) return {};
  return numbers;
}

}  // namespace pycomm
