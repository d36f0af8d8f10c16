// Server-sent events over fetch, which can carry a key. The stream ends while nobody sees the page,
// and is taken up again when the server comes back.

import { headers, reason } from "./parts.js";

// The events of an answer: [name, data as text].
export async function* events(answer) {
	const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			rest += value;
			const blocks = rest.split("\n\n");
			rest = blocks.pop();
			for (const block of blocks) {
				let name = "message";
				const data = [];
				for (const line of block.split("\n")) {
					if (line.startsWith("event: ")) name = line.slice(7);
					if (line.startsWith("data: ")) data.push(line.slice(6));
				}
				yield [name, data.join("\n")];
			}
		}
	} finally {
		reader.cancel().catch(() => {});
	}
}

const FIRST_MS = 400;
const LAST_MS = 5000;

export class Feed {
	// `on` has a function for each event, and `state(kind, words)` for how the stream is.
	constructor(on) {
		this.on = on;
		this.pause = FIRST_MS;
		this.isClosed = false; // until a key comes
		document.addEventListener("visibilitychange", () => this.look());
	}

	look() {
		if (document.hidden) {
			this.stop?.abort();
			this.on.state("wait", "hidden");
		} else if (!this.stop && !this.isClosed) {
			this.run();
		}
	}

	open() {
		this.isClosed = false;
		this.look();
	}

	async run() {
		this.stop = new AbortController();
		const signal = this.stop.signal;
		while (!signal.aborted && !this.isClosed) {
			try {
				await this.read(signal);
				if (!signal.aborted) this.on.state("away", "the stream has ended");
			} catch (error) {
				if (!signal.aborted) this.on.state("away", "no server: connecting again");
			}
			if (signal.aborted || this.isClosed) break;
			await new Promise((done) => setTimeout(done, this.pause));
			this.pause = Math.min(this.pause * 1.6, LAST_MS);
		}
		this.stop = null;
		if (signal.aborted && !document.hidden) this.look();
	}

	async read(signal) {
		const answer = await fetch("events", { headers: headers("admin"), signal, cache: "no-store" });
		if (answer.status === 401 || answer.status === 403) {
			this.isClosed = true;
			this.on.refused(await reason(answer));
			return;
		}
		if (!answer.ok) throw new Error(await reason(answer));
		this.pause = FIRST_MS;
		for await (const [name, data] of events(answer)) this.on[name]?.(JSON.parse(data));
	}
}
