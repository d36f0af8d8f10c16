// Server-sent events over fetch, which can carry a key; closed while the page is hidden.

import { about, check, headers } from "./parts.js";

const FIRST_MS = 400;
const LAST_MS = 5000;
const LOADS_MS = 2000; // a server that takes the question, and has not answered for so long, loads

// The events of an answer: [name, data as text].
export async function* events(answer) {
	const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
			rest = blocks.pop();
			for (const block of blocks) {
				const found = parsed(block);
				if (found) yield found;
			}
		}
	} finally {
		reader.cancel().catch(() => {});
	}
}

function parsed(block) {
	let name = "message";
	const data = [];
	for (const line of block.split("\n")) {
		const [, field, value] = line.match(/^(\w+): ?(.*)/) || [];
		if (field === "data") data.push(value);
		else if (field === "event") name = value;
	}
	return data.length ? [name, data.join("\n")] : null;
}

let on = null; // a function per event, and `state(kind, words)` for the stream's state
let pause = FIRST_MS;
let isClosed = false; // until there is a key
let stop = null;

export function open(handlers) {
	on = handlers;
	isClosed = false;
	look();
}

export function look() {
	if (document.hidden) {
		stop?.abort();
		on.state("wait", "hidden");
	} else if (!stop && !isClosed) {
		run();
	}
}

// Another model is shown from now on.
export function again() {
	pause = FIRST_MS;
	stop?.abort();
}

async function run() {
	stop = new AbortController();
	const signal = stop.signal;
	for (;;) {
		const loads = setTimeout(() => on.state("wait", "the server loads its model"), LOADS_MS);
		const words = await follow(signal, loads).then(() => "the stream has ended", reason);
		clearTimeout(loads);
		if (signal.aborted || isClosed) break;
		on.state("away", words);
		await new Promise((done) => setTimeout(done, pause));
		pause = Math.min(pause * 1.6, LAST_MS);
	}
	stop = null;
	if (signal.aborted && !document.hidden) look();
}

// A server that answers with an error says why; a failed connection has only the browser's words.
const reason = (error) => error.name === "Error" ? error.message : "no server: connecting again";

async function follow(signal, loads) {
	const answer = await fetch(about("events"), { headers: headers("admin"), signal, cache: "no-store" });
	clearTimeout(loads);
	if (answer.status === 401 || answer.status === 403) {
		isClosed = true;
		await check(answer).catch((error) => on.refused(error.message));
	}
	await check(answer);
	pause = FIRST_MS;
	for await (const [name, data] of events(answer)) on[name]?.(JSON.parse(data));
}
