#include "codecs/base/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "codecs/base/block.h"
#include "core/error.h"

namespace pycomm::codecs {
namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

size_t edits(std::string_view a, std::string_view b) {
  // Edits from the part of `a` so far to each part of `b`, and from the two parts of `a` before.
  std::vector<size_t> row(b.size() + 1), above(row), before(row);
  for (size_t j = 0; j <= b.size(); j++) row[j] = j;
  for (size_t i = 1; i <= a.size(); i++) {
    before.swap(above);
    above.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const char x = lower(a[i - 1]), y = lower(b[j - 1]);
      row[j] = std::min({above[j - 1] + (x == y ? 0 : 1), above[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && x == lower(b[j - 2]) && lower(a[i - 2]) == y) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row.back();
}

}  // namespace

std::string join(const std::vector<std::string>& texts) {
  std::string out;
  for (const auto& text : texts) out += (out.empty() ? "" : ", ") + text;
  return out;
}

std::string closest(std::string_view word, const std::vector<std::string>& names) {
  constexpr size_t kLongest = 100;  // of a word that can be meant
  std::string found;
  size_t fewest = word.size() > kLongest ? 0 : (word.size() + 1) / 3 + 1;  // too many
  for (const std::string& name : names) {
    const size_t size = std::max(name.size(), word.size()) - std::min(name.size(), word.size());
    if (size >= fewest) continue;
    const size_t now = edits(word, name);
    if (now >= fewest) continue;
    fewest = now;
    found = name;
  }
  return found;
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

int Options::integer(std::string_view option, int otherwise) {
  const std::string* value = find(option);
  if (value == nullptr) return otherwise;
  int number = 0;
  const char* end = value->data() + value->size();
  const auto parsed = std::from_chars(value->data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    fail(std::string(option) + "=" + *value + " is not an integer");
  }
  return number;
}

double Options::number(std::string_view option, double otherwise) {
  const std::string* value = find(option);
  if (value == nullptr) return otherwise;
  double number = 0;
  const char* end = value->data() + value->size();
  const auto parsed = std::from_chars(value->data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    fail(std::string(option) + "=" + *value + " is not a number");
  }
  return number;
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
