// What happened to a request, and why, as GET /requests/{rid} tells it; and how to ask the same
// again from a shell or a program.

import { $, button, copy, el, headers, num, reason, span } from "./parts.js";

const AGAIN_MS = 700;
const SHADES = [["queued_s", "c-warn", "queued"], ["prefill_s", "c-prefill", "prefill"], ["decode_s", "c-decode", "decode"]];
const KINDS = [["waits", "c-warn"], ["held", "c-warn"], ["deferred", "c-warn"], ["retracted", "c-bad"], ["refused", "c-bad"],
	["admitted", "c-prefill"], ["chunk", "c-prefill"], ["layers", "c-prefill"], ["first token", "c-decode"], ["finished", "c-decode"]];

export class Story {
	constructor(find) {
		this.find = find; // gives the stories of a name
		this.asked = new Map(); // bodies that this page has sent, by name
		this.rid = "";
		$("story-close").addEventListener("click", () => this.close());
	}

	async open(rid) {
		this.rid = rid;
		$("story").hidden = false;
		$("story-body").replaceChildren(el("p", "none", "Looking it up…"));
		await this.load();
		$("story-body").focus({ preventScroll: true });
	}

	close() {
		this.rid = "";
		clearTimeout(this.timer);
		$("story").hidden = true;
	}

	async load() {
		clearTimeout(this.timer);
		const rid = this.rid;
		let found = [];
		try {
			found = await this.find(rid);
		} catch (error) {
			if (rid === this.rid) $("story-body").replaceChildren(el("p", "none", error.message));
			return;
		}
		if (rid !== this.rid) return;
		$("story-body").replaceChildren(...found.map((one) => this.tell(one)));
		if (found.some((one) => one.state !== "finished")) this.timer = setTimeout(() => this.load(), AGAIN_MS);
	}

	tell(one) {
		const box = el("article");
		box.append(el("p", "rid", one.rid));
		const stages = el("div", "stages");
		const times = [];
		for (const [name, kind, word] of SHADES) {
			const seconds = one.stages[name];
			if (seconds === null || seconds === undefined) continue;
			const part = stages.appendChild(el("i", kind));
			part.style.setProperty("--p", (seconds / Math.max(one.stages.total_s, 1e-6)).toFixed(4));
			times.push(`${word} ${seconds.toFixed(3)} s`);
		}
		let state = one.state;
		if (one.position !== null && one.position !== undefined) state += `, ${num(one.position)} before it`;
		const facts = `${state} · ${num(one.prompt_tokens)} prompt tokens, ${num(one.cached_tokens)} cached · ${num(one.output_tokens)} output tokens · ${times.join(", ")} · ${span(one.stages.total_s)} in all`;
		box.append(stages, el("p", "facts", facts));
		if (one.why) box.append(el("p", "why", one.why));
		if (one.first_token_in_s) {
			const [low, middle, high] = one.first_token_in_s.map(span);
			box.append(el("p", "facts", `first token expected in ${middle} (${low} to ${high})`));
		}
		if (one.retractions) {
			box.append(el("p", "facts", `${num(one.retractions)} retractions: ${num(one.recomputed_tokens)} tokens computed again, ${num(one.refound_tokens)} still cached`));
		}
		if (one.drafts) box.append(el("p", "facts", `guesses: ${one.drafts}`));
		const list = el("ol", "times");
		for (const entry of one.timeline) list.append(this.entry(entry));
		box.append(list, this.copies(one));
		return box;
	}

	entry(entry) {
		const shade = KINDS.find(([word]) => entry.what.startsWith(word));
		const item = el("li", shade ? shade[1] : "", entry.what);
		let steps = `step ${num(entry.first_step)}`;
		if (entry.last_step !== entry.first_step) steps += ` to ${num(entry.last_step)}`;
		if (entry.times > 1) steps += `, ${num(entry.times)} times`;
		item.append(el("small", "", `${entry.at_s.toFixed(3)} s · ${steps}`));
		return item;
	}

	copies(one) {
		const row = el("div", "copies");
		const body = this.asked.get(one.rid);
		const made = body ? [["curl", asCurl(body)], ["Python", asPython(body)]] : [["curl of this story", storyCurl(one.rid)], ["Python", storyPython(one.rid)]];
		for (const [name, text] of made) {
			const one = button("Copy " + name, () => copy(text, one));
			row.append(one);
		}
		return row;
	}
}

export async function liveStory(rid) {
	const answer = await fetch("requests/" + encodeURIComponent(rid), { headers: headers("admin") });
	if (!answer.ok) throw new Error(await reason(answer));
	return (await answer.json()).requests;
}

// ---- to copy

const base = () => new URL(".", location.href).href.replace(/\/$/, "");
const quoted = (text) => "'" + text.replaceAll("'", `'\\''`) + "'";

export function asCurl(body) {
	return `curl -N ${quoted(base() + "/v1/chat/completions")} \\\n  -H 'content-type: application/json' \\\n  -H "authorization: Bearer $WEFT_API_KEY" \\\n  -d ${quoted(JSON.stringify(body))}`;
}

export function asPython(body) {
	return `import json\nimport os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(base() + "/v1")}, api_key=os.environ.get("WEFT_API_KEY", "none"))\n` +
		`body = json.loads(r'''${JSON.stringify(body).replaceAll("'''", "\\u0027\\u0027\\u0027")}''')\nbody["stream"] = False\nanswer = client.post("/chat/completions", body=body, cast_to=object)\nprint(answer["choices"][0]["message"]["content"])\n`;
}

const storyUrl = (rid) => base() + "/requests/" + encodeURIComponent(rid);

function storyCurl(rid) {
	return `curl -s -H "authorization: Bearer $WEFT_ADMIN_API_KEY" ${quoted(storyUrl(rid))}`;
}

function storyPython(rid) {
	return `import os\n\nimport httpx\n\nheaders = {"authorization": "Bearer " + os.environ.get("WEFT_ADMIN_API_KEY", "none")}\nanswer = httpx.get(${JSON.stringify(storyUrl(rid))}, headers=headers)\nfor line in answer.json()["requests"][0]["text"]:\n    print(line)\n`;
}
