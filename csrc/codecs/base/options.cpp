#include "codecs/base/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "codecs/base/block.h"
#include "core/error.h"

namespace pycomm::codecs {

std::string join(const std::vector<std::string>& texts) {
  std::string out;
  for (const auto& text : texts) out += (out.empty() ? "" : ", ") + text;
  return out;
}

Options::Options(std::string_view codec, std::string_view text) : codec_(codec) {
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    if (item.empty()) continue;
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos && given_.empty()) {
      given_.emplace_back("", item);  // of the option that the codec requests first
      continue;
    }
    if (equals == std::string_view::npos) {
      fail("write \"" + std::string(item) + "\" as option=value");
    }
    std::string option(item.substr(0, equals));
    for (const auto& earlier : given_) {
      if (earlier.first == option) fail(option + " is given twice");
    }
    given_.emplace_back(std::move(option), item.substr(equals + 1));
  }
}

const std::string* Options::find(std::string_view option) {
  if (asked_.empty() && !given_.empty() && given_.front().first.empty()) {
    for (size_t i = 1; i < given_.size(); i++) {
      if (given_[i].first == option) fail(std::string(option) + " is given twice");
    }
    given_.front().first = option;
  }
  asked_.emplace_back(option);
  for (const auto& [name, value] : given_) {
    if (name == option) return &value;
  }
  return nullptr;
}

template <typename Number>
Number Options::parsed(std::string_view option, Number otherwise, const char* what) {
  const std::string* value = find(option);
  if (value == nullptr) return otherwise;
  Number number = 0;
  const char* end = value->data() + value->size();
  const auto read = std::from_chars(value->data(), end, number);
  if (read.ec != std::errc() || read.ptr != end) {
    fail(std::string(option) + "=" + *value + " is not " + what);
  }
  return number;
}

int Options::integer(std::string_view option, int otherwise) {
  return parsed(option, otherwise, "an integer");
}

double Options::number(std::string_view option, double otherwise) {
  return parsed(option, otherwise, "a number");
}

int Options::choice(std::string_view option, std::initializer_list<std::string_view> choices,
                    int otherwise) {
  const std::string* value = find(option);
  if (value == nullptr) return otherwise;
  const auto found = std::find(choices.begin(), choices.end(), *value);
  if (found == choices.end()) {
    fail(std::string(option) + "=" + *value + ": use one of " +
         join({choices.begin(), choices.end()}));
  }
  return static_cast<int>(found - choices.begin());
}

void Options::finish() const {
  for (const auto& option : given_) {
    if (option.first.empty()) fail("write \"" + option.second + "\" as option=value");
    if (std::find(asked_.begin(), asked_.end(), option.first) == asked_.end()) {
      fail("unknown option \"" + option.first + "\"; it has the options " + join(asked_));
    }
  }
}

void Options::fail(const std::string& what) const { throw Error(codec_ + ": " + what); }

std::string number_text(double number) {
  char text[400];
  const double size = std::abs(number);
  const bool fixed = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto format = fixed ? std::chars_format::fixed : std::chars_format::scientific;
  std::string out(text, std::to_chars(text, text + sizeof text, number, format).ptr);
  if (fixed && out.find('.') == std::string::npos) out += ".0";
  return out;
}

uint32_t block_option(Options& options, uint32_t otherwise) {
  const int block = options.integer("block", static_cast<int>(otherwise));
  const bool power = block > 0 && (block & (block - 1)) == 0;
  if (!power || block < static_cast<int>(kMinBlock) || block > static_cast<int>(kMaxBlock)) {
    options.fail("block=" + std::to_string(block) + ": use a power of two from 32 to 2048");
  }
  return static_cast<uint32_t>(block);
}

}  // namespace pycomm::codecs
