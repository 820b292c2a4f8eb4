#include "weft/comm/ucx/address_exchange.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>

#include "weft/comm/run_with_deadline.h"
#include "weft/comm/store_exchange.h"

namespace weft::comm::ucx {
namespace {

/// Header of a rank's record, followed by the address or, if has_address is 0, by an error text.
struct RecordHeader {
  std::array<char, 8> magic{'w', 'e', 'f', 't', '-', 'u', 'c', 'x'};
  uint32_t version = kWireVersion;
  uint32_t has_address = 0;
  Token part{};  // XORed over the ranks: the token of the group
};

std::string make_record(const RecordHeader& head, const std::string& text) {
  return std::string(reinterpret_cast<const char*>(&head), sizeof(head)) + text;
}

/// Parses the record of rank `r` into `all`.
void read_record(const UcxOptions& options, int r, const std::string& bytes, PeerAddresses& all) {
  RecordHeader head{};
  const auto expected = head.magic;
  const bool complete = bytes.size() > sizeof(head) && bytes.size() < (1 << 20);
  if (complete) std::memcpy(&head, bytes.data(), sizeof(head));
  if (!complete || head.magic != expected || head.version != kWireVersion) {
    C10_THROW_ERROR(DistError,
                    c10::str("UCX transport of group '", options.group, "': rank ", r, " does not use wire format ",
                             kWireVersion, ". Run the same version of weft on all ranks."));
  }
  auto text = bytes.substr(sizeof(head));
  if (!head.has_address)
    C10_THROW_ERROR(DistError, c10::str("UCX transport of group '", options.group, "': rank ", r, " failed: ", text));
  all.addresses[r] = std::move(text);
  all.token[0] ^= head.part[0];
  all.token[1] ^= head.part[1];
}

}  // namespace

PeerAddresses exchange_addresses(const UcxOptions& options, const std::function<std::string()>& address) {
  StoreExchangeOptions exchange{"weft/ucx", options.rank, options.size, options.timeout};
  exchange.prefix +=
      c10::str("/", next_generation(options.store, exchange));  // keys of an earlier transport may remain
  PeerAddresses all{.addresses = std::vector<std::string>(options.size),
                    .key = c10::str(exchange.prefix, "/", options.rank)};
  std::string local;
  std::exception_ptr failed;
  try {
    local = make_record({.has_address = 1, .part = random_token()}, address());
  } catch (const std::exception& error) {
    local = make_record({.has_address = 0}, error.what());
    failed = std::current_exception();
  }
  const auto records = exchange_through_store(options.store, exchange, local);
  if (failed) std::rethrow_exception(failed);
  for (int r = 0; r < options.size; ++r) read_record(options, r, records[r], all);
  return all;
}

void remove_record(const UcxOptions& options, const PeerAddresses& peer_addresses) {
  run_with_deadline(std::chrono::steady_clock::now() + options.timeout,
                    [store = options.store, key = peer_addresses.key] {
                      try {
                        store->deleteKey(key);
                      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): not all Stores support it
                      }
                    });
}

}  // namespace weft::comm::ucx
