// One answer on its way: it is asked, grows, is kept as it grows, and ends.

import { check, headers } from "../parts.js";
import { events } from "../feed.js";
import { mine } from "../engine/rows.js";
import * as story from "../engine/story.js";
import * as store from "./store.js";
import { take } from "./request.js";

const KEPT_MS = 1_000; // between two times at which a growing answer is kept

export class Turn {
	view = null; // draws the answer while it is on the screen: grow()
	#body;
	#stopper = new AbortController();
	#keptAt = 0;

	constructor(node, body) {
		this.node = node;
		this.#body = body;
		node.rid = "page-" + crypto.getRandomValues(new Uint32Array(2)).join("-");
		for (const name of ["usage", "firstMs", "wholeMs"]) delete node[name];
		mine.add(node.rid);
		story.asked.set(node.rid, body);
	}

	stop() {
		this.#stopper.abort();
	}

	async run() {
		const { node } = this;
		const began = performance.now();
		const keep = () => store.saveNode(node);
		window.addEventListener("pagehide", keep);
		try {
			await this.#follow(began);
			node.end ||= "stop";
		} catch (error) {
			if (error.name === "AbortError") node.end = "stopped";
			else node.error = error.name === "TypeError" ? "the server cannot be reached" : error.message;
		}
		window.removeEventListener("pagehide", keep);
		node.wholeMs = performance.now() - began;
		await keep();
	}

	async #follow(began) {
		const { node } = this;
		const answer = await check(await fetch("v1/chat/completions", {
			method: "POST", signal: this.#stopper.signal, body: JSON.stringify(this.#body),
			headers: { "content-type": "application/json", "x-request-id": node.rid, ...headers("user") },
		}));
		for await (const [, data] of events(answer)) {
			if (data === "[DONE]") return;
			take(node, JSON.parse(data));
			if (node.text || node.thought || node.calls) node.firstMs ??= performance.now() - began;
			this.view?.grow();
			this.#keep();
		}
		if (!node.end) throw new Error("the server has ended in the midst of this answer");
	}

	#keep() {
		if (performance.now() - this.#keptAt < KEPT_MS) return;
		this.#keptAt = performance.now();
		store.saveNode(this.node);
	}
}
