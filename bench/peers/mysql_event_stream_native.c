/* SPDX-License-Identifier: Apache-2.0
 *
 * Drive libmes (mysql-event-stream's C++ core) from C over a whole binlog file, so that its own speed is measured
 * and not that of a foreign-function interface: feed the bytes, take every event, touch every column.
 *
 *   driver LIBRARY FILE  ->  "inserts updates deletes checksum"
 *
 * The structures follow the C ABI, version 3, that the package's own Python mirror publishes (_ffi.py).
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHUNK_BYTES (1 << 16)
#define MAGIC_BYTES 4
#define ABI_VERSION 3
#define NO_EVENT 300

struct column {
    int32_t type;
    int64_t integer;
    double real;
    const char *text;
    uint32_t text_bytes;
    const char *name;
};

struct event {
    int32_t type;
    const char *database, *table;
    const struct column *before;
    uint32_t before_count;
    const struct column *after;
    uint32_t after_count;
    uint32_t timestamp;
    const char *file;
    uint64_t offset;
    int32_t names_resolved;
    const char *statement;
};

static uint64_t touch(const struct column *columns, uint32_t count) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++) sum += (uint64_t)columns[i].integer + columns[i].text_bytes;
    return sum;
}

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) { fprintf(stderr, "no %s: %s\n", name, dlerror()); exit(2); }
    return found;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    uint32_t (*abi)(void) = symbol(library, "mes_abi_version");
    size_t (*event_size)(void) = symbol(library, "mes_sizeof_event");
    size_t (*column_size)(void) = symbol(library, "mes_sizeof_column");
    if (abi() != ABI_VERSION || event_size() != sizeof(struct event) || column_size() != sizeof(struct column)) {
        fprintf(stderr, "the library's ABI is not version %d\n", ABI_VERSION);
        return 2;
    }
    void *(*create)(void) = symbol(library, "mes_create");
    int (*feed)(void *, const uint8_t *, size_t, size_t *) = symbol(library, "mes_feed");
    int (*next)(void *, const struct event **) = symbol(library, "mes_next_event");
    FILE *file = fopen(argv[2], "rb");
    void *engine = create();
    static uint8_t chunk[CHUNK_BYTES];
    if (!file || !engine || fseek(file, MAGIC_BYTES, SEEK_SET)) { perror(argv[2]); return 2; }
    uint64_t kinds[3] = {0, 0, 0}, checksum = 0;
    for (size_t length; (length = fread(chunk, 1, CHUNK_BYTES, file)) > 0;) {
        for (size_t done = 0, consumed; done < length; done += consumed) {
            int code = feed(engine, chunk + done, length - done, &consumed);
            if (code) { fprintf(stderr, "mes_feed: %d\n", code); return 1; }
            const struct event *event;
            while (!(code = next(engine, &event))) {
                if (event->type < 0 || event->type > 2) { fprintf(stderr, "event type %d\n", event->type); return 1; }
                kinds[event->type]++;
                checksum += touch(event->before, event->before_count) + touch(event->after, event->after_count);
            }
            if (code != NO_EVENT) { fprintf(stderr, "mes_next_event: %d\n", code); return 1; }
        }
    }
    printf("%llu %llu %llu %llu\n", (unsigned long long)kinds[0], (unsigned long long)kinds[1],
           (unsigned long long)kinds[2], (unsigned long long)checksum);
    return 0;
}
