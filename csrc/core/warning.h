// Warnings: what a user should know though nothing has failed. Each text is said once in a process.
#pragma once
#include <functional>
#include <string>

#include "core/types.h"

namespace pycomm {

/// Says a sentence, on the standard error stream unless set_warning_output() says where.
PYCOMM_API void warn_once(const std::string& text);
/// Python logs warnings. Any thread may call `say`.
PYCOMM_API void set_warning_output(std::function<void(const std::string&)> say);

}  // namespace pycomm
