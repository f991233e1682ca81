// Decimal numbers as text, with a point in every locale. A program's setlocale() changes what
// strtod, sscanf and std::to_string do, on its rank alone: others could not read what it publishes.
#pragma once
#include <charconv>
#include <string>
#include <string_view>

namespace pycomm {

/// Returns the shortest text that reads as the same number.
inline std::string decimal_text(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

/// Returns it rounded to so many digits, for people.
inline std::string decimal_text(double number, int digits) {
  char text[64];
  const auto general = std::chars_format::general;
  return {text, std::to_chars(text, text + sizeof text, number, general, digits).ptr};
}

/// Takes a number from the beginning of a text. Returns false if there is none.
inline bool take_decimal(std::string_view& text, double& number) {
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  if (read.ec != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(read.ptr - text.data()));
  return true;
}

}  // namespace pycomm
