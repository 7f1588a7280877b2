package bench;

import com.fasterxml.jackson.annotation.JsonProperty;
import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLongArray;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RReadWriteLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * A worker of the comparison: one JVM with clients of Redisson. It does what the workers of worker.go do, in answer to
 * the same orders, and measures it in the same way.
 */
public final class Worker {
    record Role(
            @JsonProperty("Dir") String dir,
            @JsonProperty("Addr") String addr,
            @JsonProperty("TTL") long ttl,
            @JsonProperty("First") int first,
            @JsonProperty("Clients") int clients) {}

    record Order(
            @JsonProperty("Do") String what,
            @JsonProperty("Name") String name,
            @JsonProperty("Names") boolean names,
            @JsonProperty("For") long time,
            @JsonProperty("Count") int count,
            @JsonProperty("Goroutines") int threads,
            @JsonProperty("Reads") int reads) {}

    static final class Answer {
        @JsonProperty("Failed") String failed = "";
        @JsonProperty("At") Instant at;
        @JsonProperty("Figures") Map<String, Double> figures = new TreeMap<>();
        @JsonProperty("Waits") Map<Integer, Long> waits = new TreeMap<>();
        @JsonProperty("Trouble") String trouble = "";
    }

    static final int WIDTH = 64; // threads that take and give many locks
    static final long WRITER = -(1L << 40); // as in worker.go
    static final VarHandle LONGS = MethodHandles.byteBufferViewVarHandle(long[].class, ByteOrder.nativeOrder());

    final List<RedissonClient> clients = new ArrayList<>();
    final ByteBuffer inside; // counts those inside the lock, in all processes
    final ExecutorService[] threads = new ExecutorService[WIDTH];
    RLock locked; // the lock that it was ordered to take
    RLock[] taken;

    /** Ends with its input, so it does not outlive the process that started it. */
    public static void main(String[] args) throws Exception {
        ObjectMapper json = new ObjectMapper().disable(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES);
        BlockingQueue<String> lines = new LinkedBlockingQueue<>();
        Thread reader = new Thread(() -> {
            try (BufferedReader in = new BufferedReader(new InputStreamReader(System.in))) {
                for (String line; (line = in.readLine()) != null; ) {
                    lines.add(line);
                }
            } catch (IOException e) {
                // as if it had ended
            }
            Runtime.getRuntime().halt(0);
        });
        reader.setDaemon(true);
        reader.start();
        Worker worker = null;
        Answer answer = new Answer();
        try {
            worker = new Worker(json.readValue(System.getenv("LEASED_BENCH_WORKER"), Role.class));
        } catch (Exception e) {
            answer.failed = e.toString();
        }
        for (;;) {
            // Instants as text, without a library for them.
            Map<String, Object> text = new TreeMap<>(Map.of(
                    "Failed", answer.failed, "Figures", answer.figures, "Waits", answer.waits, "Trouble", answer.trouble));
            if (answer.at != null) {
                text.put("At", answer.at.toString());
            }
            System.out.println(json.writeValueAsString(text));
            System.out.flush();
            String line = lines.take();
            try {
                answer = worker.carryOut(json.readValue(line, Order.class));
            } catch (Exception e) {
                answer = new Answer();
                answer.failed = e.toString();
            }
        }
    }

    Worker(Role role) throws Exception {
        try (FileChannel file = FileChannel.open(Path.of(role.dir, "inside"),
                StandardOpenOption.READ, StandardOpenOption.WRITE, StandardOpenOption.CREATE)) {
            inside = file.map(FileChannel.MapMode.READ_WRITE, 0, 4096).order(ByteOrder.nativeOrder());
        }
        for (int i = 0; i < role.clients; i++) {
            Config config = new Config();
            config.useSingleServer().setAddress("redis://" + role.addr);
            config.setLockWatchdogTimeout(TimeUnit.NANOSECONDS.toMillis(role.ttl));
            RedissonClient client = Redisson.create(config);
            clients.add(client);
            cycle(client, "warm:" + (role.first + i));
        }
        for (int i = 0; i < WIDTH; i++) {
            threads[i] = Executors.newSingleThreadExecutor();
        }
    }

    Answer carryOut(Order o) throws Exception {
        Answer a = new Answer();
        switch (o.what) {
            case "cycle":
                return cycles(o);
            case "lock":
                locked = clients.get(0).getLock(o.name);
                locked.lock();
                a.at = Instant.now();
                return a;
            case "unlock":
                a.at = Instant.now();
                locked.unlock();
                return a;
            case "contend":
                return contend(o);
            case "warm":
                long end = System.nanoTime() + o.time;
                each(WIDTH, i -> {
                    do {
                        cycle(clients.get(0), "warm:" + i);
                    } while (System.nanoTime() < end);
                });
                return a;
            case "take":
                return take(o);
            case "give":
                a.figures.put("seconds", each(taken.length, i -> taken[i].unlock()));
                a.figures.put("locks", (double) taken.length);
                return a;
            default:
                throw new IllegalArgumentException("there is no order " + o.what);
        }
    }

    static void cycle(RedissonClient client, String name) {
        RLock lock = client.getLock(name);
        lock.lock();
        lock.unlock();
    }

    /** Locks and unlocks a lock that nobody else wants. */
    Answer cycles(Order o) {
        RedissonClient client = clients.get(0);
        String[] names = {o.name};
        if (o.names) {
            names = new String[10_000];
            for (int i = 0; i < names.length; i++) {
                names[i] = o.name + ":" + i;
            }
        }
        for (int i = 0; i < o.count; i++) {
            cycle(client, o.name);
        }
        long[] took = new long[100_000];
        int n = 0;
        for (long end = System.nanoTime() + o.time; System.nanoTime() < end && n < took.length; n++) {
            long at = System.nanoTime();
            cycle(client, names[n % names.length]);
            took[n] = System.nanoTime() - at;
        }
        Arrays.sort(took, 0, n);
        Answer a = new Answer();
        a.figures.put("cycles", (double) n);
        a.figures.put("p50", took[n / 2] / 1e9);
        a.figures.put("p99", took[(int) (n * 99L / 100)] / 1e9);
        return a;
    }

    static final class Seat {
        long leases;
        long reads;
        long overlaps;
        long longest;
        long failed;
        String trouble = "";
    }

    /** All clients lock and unlock one lock for a time, and check that nobody is inside who must not be. */
    Answer contend(Order o) throws InterruptedException {
        AtomicLongArray waits = new AtomicLongArray(64 * 8);
        Seat[] seats = new Seat[clients.size() * o.threads];
        Thread[] all = new Thread[seats.length];
        long end = System.nanoTime() + o.time;
        for (int i = 0; i < seats.length; i++) {
            Seat s = seats[i] = new Seat();
            RedissonClient client = clients.get(i % clients.size());
            all[i] = new Thread(() -> {
                for (long asked; (asked = System.nanoTime()) < end; ) {
                    boolean read = ThreadLocalRandom.current().nextInt(100) < o.reads;
                    try {
                        RLock lock = lockFor(client, o, read);
                        boolean ours = lock.tryLock(end - asked, TimeUnit.NANOSECONDS);
                        long waited = Math.min(System.nanoTime() - asked, o.time);
                        if (!read) {
                            s.longest = Math.max(s.longest, waited); // also a wait that the end cut short
                        }
                        if (!ours) {
                            continue;
                        }
                        if (!enter(read)) {
                            s.overlaps++;
                        }
                        s.leases++;
                        if (read) {
                            s.reads++;
                        } else {
                            waits.incrementAndGet(bin(waited));
                        }
                        leave(read);
                        lock.unlock();
                    } catch (Exception e) {
                        if (System.nanoTime() < end) {
                            s.failed++;
                            s.trouble = s.trouble.isEmpty() ? e.toString() : s.trouble;
                        }
                    }
                }
            });
        }
        for (Thread t : all) {
            t.start();
        }
        for (Thread t : all) {
            t.join();
        }
        Answer a = new Answer();
        Map<String, Double> f = a.figures;
        for (Seat s : seats) {
            f.merge("leases", (double) s.leases, Double::sum);
            f.merge("reads", (double) s.reads, Double::sum);
            f.merge("overlaps", (double) s.overlaps, Double::sum);
            f.merge("failed", (double) s.failed, Double::sum);
            f.merge("longest", s.longest / 1e9, Math::max);
            f.merge("least", (double) s.leases, Math::min);
            f.merge("most", (double) s.leases, Math::max);
            if (a.trouble.isEmpty()) {
                a.trouble = s.trouble;
            }
        }
        for (int i = 0; i < waits.length(); i++) {
            if (waits.get(i) > 0) {
                a.waits.put(i, waits.get(i));
            }
        }
        return a;
    }

    static RLock lockFor(RedissonClient client, Order o, boolean read) {
        if (o.reads == 0) {
            return client.getLock(o.name);
        }
        RReadWriteLock both = client.getReadWriteLock(o.name);
        return read ? both.readLock() : both.writeLock();
    }

    boolean enter(boolean read) {
        return read ? (long) LONGS.getAndAdd(inside, 0, 1L) >= 0 : (long) LONGS.getAndAdd(inside, 0, WRITER) == 0;
    }

    void leave(boolean read) {
        LONGS.getAndAdd(inside, 0, read ? -1L : -WRITER);
    }

    interface Step {
        void run(int i) throws Exception;
    }

    /** Does something for 0 to n-1 from 64 threads, each number always from the same thread, because threads own the locks. Returns the seconds that it took. */
    double each(int n, Step step) throws Exception {
        long began = System.nanoTime();
        List<Future<?>> all = new ArrayList<>();
        for (int t = 0; t < WIDTH; t++) {
            int first = t;
            Callable<Void> part = () -> {
                for (int i = first; i < n; i += WIDTH) {
                    step.run(i);
                }
                return null;
            };
            all.add(threads[t].submit(part));
        }
        for (Future<?> one : all) {
            one.get();
        }
        return (System.nanoTime() - began) / 1e9;
    }

    /** Locks many names and keeps the locks. */
    Answer take(Order o) throws Exception {
        taken = new RLock[o.count];
        long before = memory();
        double seconds = each(o.count, i -> {
            taken[i] = clients.get(0).getLock(o.name + ":" + i);
            taken[i].lock();
        });
        Answer a = new Answer();
        a.figures.put("seconds", seconds);
        a.figures.put("memory", (memory() - before) / (double) o.count);
        return a;
    }

    /** The bytes in use in the heap. */
    static long memory() {
        System.gc();
        System.gc();
        return Runtime.getRuntime().totalMemory() - Runtime.getRuntime().freeMemory();
    }

    /** The bin of a duration: each power of two is divided into eight bins. */
    static int bin(long nanoseconds) {
        long n = Math.max(nanoseconds, 8);
        int power = 64 - Long.numberOfLeadingZeros(n);
        return power << 3 | (int) (n >> (power - 4) & 7);
    }
}
