#include "collectives/failure.h"

#include <cstdlib>
#include <typeinfo>

namespace pycomm {
namespace {

constexpr char kTimeout[] = "[timeout] ";
constexpr char kMismatch[] = "[mismatch] ";
constexpr char kLost[] = "[lost ";  // "[lost 3] "

}  // namespace

void Failure::set(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (happened()) return;
  first_ = std::move(error);
  happened_.store(true, std::memory_order_release);
}

std::string to_reason(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Timeout& e) {
    return kTimeout + std::string(e.what());
  } catch (const WireMismatch& e) {
    return kMismatch + std::string(e.what());
  } catch (const PeerLost& e) {
    return kLost + std::to_string(e.rank) + "] " + e.what();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

std::exception_ptr from_reason(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    if (typeid(e) != typeid(Error)) return error;
    const std::string text = e.what();
    // The words before the kind say who told us.
    const auto without = [&text](size_t at, size_t length) {
      return text.substr(0, at) + text.substr(at + length);
    };
    size_t at = text.find(kTimeout);
    if (at != std::string::npos)
      return std::make_exception_ptr(Timeout(without(at, sizeof(kTimeout) - 1)));
    at = text.find(kMismatch);
    if (at != std::string::npos)
      return std::make_exception_ptr(WireMismatch(without(at, sizeof(kMismatch) - 1)));
    at = text.find(kLost);
    const size_t end = at == std::string::npos ? at : text.find("] ", at);
    if (end != std::string::npos) {
      const int rank = std::atoi(text.c_str() + at + sizeof(kLost) - 1);
      return std::make_exception_ptr(PeerLost(rank, without(at, end + 2 - at)));
    }
    return error;
  } catch (...) {
    return error;
  }
}

}  // namespace pycomm
