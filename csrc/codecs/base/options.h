// Options of a codec spec: "quant:bits=4,block=128" is the name "quant" and two options.
#pragma once
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "codecs/base/codec.h"

namespace pycomm::codecs {

/// Parsed options of a spec. The first may be given by its value alone. A codec requests each
/// option that it has, then calls `finish`, which knows by then which options exist. All throw
/// Error that names the codec, the option and what is allowed.
class Options {
 public:
  Options(std::string_view codec, std::string_view text);

  int integer(std::string_view option, int otherwise);
  double number(std::string_view option, double otherwise);
  /// Returns the place of the value in `choices`; `otherwise` is a place, too.
  int choice(std::string_view option, std::initializer_list<std::string_view> choices,
             int otherwise);
  /// Throws if an option was given that the codec did not request.
  void finish() const;

  /// Throws Error "<codec>: <what>".
  [[noreturn]] void fail(const std::string& what) const;

 private:
  const std::string* find(std::string_view option);
  template <typename Number>
  Number parsed(std::string_view option, Number otherwise, const char* what);

  std::string codec_;
  std::vector<std::pair<std::string, std::string>> given_;
  std::vector<std::string> asked_;
};

/// A function that makes a codec from its options. Each codec defines one, `make`, in its
/// namespace; registry.cpp lists them.
using Maker = std::unique_ptr<Codec>(Options& options);

/// Returns the texts with ", " between them.
std::string join(const std::vector<std::string>& texts);

/// Returns the shortest text of this number, as Python writes it: "0.01", "1e-05", "1.0".
std::string number_text(double number);

/// Returns the option "block" of the block codecs, a power of two from 32 to 2048.
uint32_t block_option(Options& options, uint32_t otherwise);

}  // namespace pycomm::codecs
